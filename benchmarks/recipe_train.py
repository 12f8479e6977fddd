"""Whole runs of ``galvatron train`` on one GPU: does it measure, plan and train unattended, and do predictions hold?

    python benchmarks/recipe_train.py [--cases llama-2k,virtual-64] --out results/recipe_train.jsonl

Each case is one command from nothing: the machine and the model's layers are measured, a plan is made, and it trains.
A line of the results has the command, its seconds, and the run's own report (predicted and measured time and memory).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipe import CASES, MODELS

_VIRTUAL = {"model": "llama", "tokens": 1024, "options": ["--virtual", "8", "--memory", "16GB"]}
_RUNS: dict[str, dict[str, Any]] = {
    **{name: {**case, "options": ["--devices", "1"]} for name, case in CASES.items()},
    "virtual-64": {**_VIRTUAL, "batch": 64},
    "virtual-best": {**_VIRTUAL, "batch": None},
}


def _run(name: str, steps: int, folder: Path) -> dict[str, Any]:
    case = _RUNS[name]
    model, out = folder / name, folder / f"{name}-run"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[case["model"]]), encoding="utf-8")
    options = [*case["options"], "--sequence-length", str(case["tokens"]), "--no-dropout", "--steps", str(steps)]
    if case["batch"] is not None:
        options += ["--batch", str(case["batch"])]
    if "lora" in case:
        options += ["--lora", str(case["lora"])]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "galvatron", "train", str(model), *options, "--out", str(out)]
    log: list[tuple[float, str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.append((round(time.perf_counter() - begin, 2), line.rstrip()))
            print(*log[-1], flush=True)
    found = {"case": name, "options": options, "status": process.returncode, "seconds": time.perf_counter() - begin}
    found["log"] = log
    report = out / "report.json"
    if report.exists():
        found["report"] = json.loads(report.read_text(encoding="utf-8"))
    plan = out / "plan.json"
    if plan.exists():
        made = json.loads(plan.read_text(encoding="utf-8"))
        found["plan"] = {key: made[key] for key in ("batch", "micro_batches", "stages") if key in made}
    shutil.rmtree(out, ignore_errors=True)  # checkpoints are large
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="llama-2k,llama-8k,qwen3-2k,bert,virtual-64")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="benchmarks/results/recipe_train.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases.split(","):
            found = _run(name, args.steps, Path(folder))
            with Path(args.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
