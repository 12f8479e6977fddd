#!/bin/bash
# Training on two machines by hand: run this on each of them, with the first one's address.
#
#   examples/two_nodes.sh ADDRESS NODE_RANK PLAN OUT        # NODE_RANK 0 on the machine with that address, 1 on the other
set -euo pipefail

address=$1
node=$2
plan=$3
out=$4

torchrun \
    --nnodes 2 --node-rank "$node" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$address" --master-port 29500 \
    -m galvatron train "$plan" --output "$out" --steps 10000 --save-every 500
