#!/usr/bin/env bash
# From `git clone` to the first step of one's own training, on CPUs: each line with the seconds since the beginning.
#   benchmarks/first_step.sh [FOLDER]    FOLDER: where the clone goes (default: a temporary one)
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)/galvatron}
export GALVATRON_CACHE="$folder/.cache"  # nothing was measured before
start=$(date +%s)
say() { echo "$(($(date +%s) - start)) s  $*"; }
git clone -q "$here" "$folder" && cd "$folder" && say "git clone"
python3 -m venv .venv
.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[torch,data]" 2> pip.log
say "pip install"
.venv/bin/python examples/chat_model.py > model.log 2>&1
say "a model's folder and chat data"
.venv/bin/galvatron train ./mine --data chat.jsonl --devices 2 --batch 8 --sequence-length 64 --steps 20 2>&1 |
  while IFS= read -r line; do say "$line"; done
