"""Whole runs of ``galvatron train`` on one GPU: does it measure, plan and train unattended, and do predictions hold?

    python benchmarks/recipe_train.py [--cases llama-2k,virtual-64] [--trace] --out results/recipe_train.jsonl

Each case is one command from nothing: the machine and the model's layers are measured, a plan is made, and it trains.
Long samples on eight parts of one GPU take long to measure, so their layers are measured without TP, by a command
before, once for the cases of one length (``--profiles`` keeps them for the next time). A line of the results has the
command, its seconds, and the run's own report (predicted and measured time and memory); with ``--trace`` also the GPU's
seconds on rank 0 in the second step, kernel by kernel.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from recipe import CASES, MODELS

_VIRTUAL = {"model": "llama", "tokens": 1024, "options": ["--virtual", "8", "--memory", "16GB"]}
_RUNS: dict[str, dict[str, Any]] = {
    **{name: {**case, "options": ["--devices", "1"]} for name, case in CASES.items()},
    "virtual-64": {**_VIRTUAL, "batch": 64},
    "virtual-best": {**_VIRTUAL, "batch": None},
    **{
        f"long-{length}k{variant}": {
            **_VIRTUAL, "tokens": length * 1024, "batch": 1, "kind": ["--no-compile"], "more": more,
            "measure": ["--tp-degrees", "1", "--rounds", "3"],
        }
        for length in (64, 128, 256, 384)
        for variant, more in (("", []), ("-ulysses", ["--forbid", "ring"]), ("-ring", ["--forbid", "ulysses"]))
    },
}  # fmt: skip


def _run(name: str, steps: int, folder: Path, profiles: Path, *, cluster: str | None, trace: bool) -> dict[str, Any]:
    case = _RUNS[name]
    model, out = folder / name, folder / f"{name}-run"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[case["model"]]), encoding="utf-8")
    kind = ["--sequence-length", str(case["tokens"]), "--no-dropout", *case.get("kind", ())]
    kind += [] if cluster is None else ["--cluster", cluster]
    options = [*case["options"], *kind, *case.get("more", ()), "--steps", str(steps)]
    if case["batch"] is not None:
        options += ["--batch", str(case["batch"])]
    if "lora" in case:
        options += ["--lora", str(case["lora"])]
    if trace:
        options += ["--trace", "2"]
    log: list[tuple[float, str]] = []
    begin = time.perf_counter()
    found: dict[str, Any] = {"case": name, "options": options, "log": log}
    if "measure" in case:
        profile = profiles / f"{case['model']}-{case['tokens']}.toml"
        if not profile.exists():
            measure = [*case["options"][:2], *kind, *case["measure"], "--output", str(profile)]
            status = _galvatron(["profile", "model", str(model), *measure], begin, log)
            found |= {"measure": measure[:-2], "measure_status": status}
            if status:
                return found
        found["profile"] = profile.read_text(encoding="utf-8")
        measured = ["--profile", str(profile)]
    else:
        measured = []
    found["status"] = _galvatron(["train", str(model), *options, *measured, "--out", str(out)], begin, log)
    found["seconds"] = time.perf_counter() - begin
    report = out / "report.json"
    if report.exists():
        found["report"] = json.loads(report.read_text(encoding="utf-8"))
    plan = out / "plan.json"
    if plan.exists():
        made = json.loads(plan.read_text(encoding="utf-8"))
        found["plan"] = {key: made[key] for key in ("batch", "micro_batches", "stages") if key in made}
        found["cluster"] = made["cluster"]
    traced = out / "trace-rank0.json"
    if traced.exists():
        found["step"] = _kernels(traced)
    shutil.rmtree(out, ignore_errors=True)  # checkpoints are large
    return found


def _galvatron(arguments: list[str], begin: float, log: list[tuple[float, str]]) -> int:
    command = [sys.executable, "-m", "galvatron", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.append((round(time.perf_counter() - begin, 2), line.rstrip()))
                print(*log[-1], flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # else its ranks stay, and the GPU is not the next program's alone
    return process.returncode


def _kernels(trace: Path) -> dict[str, Any]:
    """Seconds of a step on the GPU: the whole, with nothing running, and of the kernels that took longest how often
    they ran, how long together, and how long of it (communication alone) nothing was computed."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    own = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    spans = {place: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for place, event in enumerate(own)}
    sends = {place for place, event in enumerate(own) if event["name"].startswith("nccl")}
    times, seconds, alone = Counter[str](), Counter[str](), Counter[str]()
    busy = _joined([spans[place] for place in spans if place not in sends])
    for place, event in enumerate(own):
        name = event["name"][:100]
        times[name] += 1
        seconds[name] += spans[place][1] - spans[place][0]
        if place in sends:
            begin, end = spans[place]
            alone[name] += end - begin - sum(max(0.0, min(end, to) - max(begin, at)) for at, to in busy)
    any_work = _joined(list(spans.values()))
    whole = any_work[-1][1] - any_work[0][0]
    return {
        "whole": round(whole, 4),
        "idle": round(whole - sum(to - at for at, to in any_work), 4),
        "computing": round(sum(to - at for at, to in busy), 4),
        "kernels": {
            name: (times[name], round(took, 4), round(alone[name], 4)) for name, took in seconds.most_common(40)
        },
    }


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, those that overlap made one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="llama-2k,llama-8k,qwen3-2k,bert,virtual-64")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", action="store_true", help="add the GPU's seconds of the second step, by kernel")
    parser.add_argument("--cluster", help="links and devices that were measured before (default: they are measured)")
    parser.add_argument(
        "--profiles", type=Path, help="where profiles of long samples are kept; those that are there are not made again"
    )
    parser.add_argument("--out", default="benchmarks/results/recipe_train.jsonl")
    args = parser.parse_args()
    unknown = [name for name in args.cases.split(",") if name not in _RUNS]
    if unknown:
        parser.error(f"cases: {unknown[0]!r} given; expected some of {', '.join(_RUNS)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases.split(","):
            found = _run(
                name, args.steps, Path(folder), args.profiles or Path(folder), cluster=args.cluster, trace=args.trace
            )
            with Path(args.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
