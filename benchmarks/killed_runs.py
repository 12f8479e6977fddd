"""Runs of ``galvatron train`` that are killed, and go on from their last checkpoint, beside one that was left alone.

    python benchmarks/killed_runs.py --virtual 4 --out results/killed_runs.jsonl      (a GPU divided in four)
    python benchmarks/killed_runs.py --devices 2 --size tiny --out /dev/stdout     (CPUs)

A GPT-2 trains for 16 steps with a checkpoint every 4. Its processes are killed (SIGKILL) after step 10.
The run then goes on under the same plan, under another one, and on half of the devices. A line of the results for each
has the largest difference of a loss and of an exported weight from the run that was left alone, and the seconds until
the first step that the killed run had not reached. The same run twice says how far apart two of them are by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

_STEPS, _SAVED, _KILLED = 16, 4, 10
_SIZES = {
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 512},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 32},
}


def _plan(path: Path, config: dict[str, Any], devices: int, strategies: tuple[str, ...], precision: str) -> None:
    """Strategies in turn, layer by layer."""
    from galvatron.core.spec import Precision, Training
    from galvatron.families import load_cluster
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.by_hand import priced
    from galvatron.planner.plan.planner import Request

    training = Training(precision=Precision(precision), sequence_length=config["n_positions"])
    spec = load_any_model(config, training)
    base = load_cluster("h200-8")
    levels = (replace(base.levels[0], units=devices),) if devices > 1 else ()
    cluster = replace(base, name="any", levels=levels, device=replace(base.device, memory_bytes=64 * 2**30))
    chosen = [strategies[place % len(strategies)] for place in range(len(spec.layers))]
    priced(Request(model=spec, cluster=cluster, batch=16), [chosen], micro_batches=2).save(path)


def _start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "galvatron", "train", *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def _metrics(run: Path) -> dict[int, dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return {found["step"]: found for line in lines if line.endswith("\n") and (found := json.loads(line))}


def _wait(process: subprocess.Popen[bytes], run: Path, until: int, log: Path) -> float:
    """Seconds until that step is in the metrics."""
    begin = time.monotonic()
    while until not in _metrics(run):
        if process.poll() is not None and until not in _metrics(run):
            sys.exit(
                f"{run.name}: ended with status {process.returncode} before step {until}:\n{log.read_text()[-2000:]}"
            )
        if time.monotonic() - begin > 300:
            _kill(process.pid)
            sys.exit(f"{run.name}: no step {until} within 300 s")
        time.sleep(0.05)
    return time.monotonic() - begin


def _kill(pid: int) -> None:
    """A process and all that it started, the latter first."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
        _kill(int(child))
    os.kill(pid, signal.SIGKILL)


def _weights(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    out = run / "exported"
    if not out.exists():
        command = [sys.executable, "-m", "galvatron", "export", str(run), str(out)]
        subprocess.run(command, check=True, capture_output=True)
    return load_file(out / "model.safetensors")


def _difference(run: Path, other: Path) -> dict[str, Any]:
    ours, theirs = _metrics(run), _metrics(other)
    assert ours.keys() == theirs.keys() == set(range(1, _STEPS + 1)), "a line for each step"
    weights, alone = _weights(run), _weights(other)
    far = max(float((weights[name] - alone[name]).abs().max()) for name in alone)
    return {
        "loss": ours[_STEPS]["loss"],
        "losses_differ": max(abs(ours[step]["loss"] - theirs[step]["loss"]) for step in ours),
        "weights_differ": far,
        "bit_identical": far == 0,
    }


def _measure(folder: Path, args: argparse.Namespace) -> None:
    devices = args.virtual or args.devices
    share = 0.1 if args.dropout else 0.0
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **_SIZES[args.size]}
    config |= {"resid_pdrop": share, "embd_pdrop": share, "attn_pdrop": share}
    plans = {name: folder / f"{name}.json" for name in ("first", "second", "half")}
    precision = "bf16" if args.virtual else "fp32"
    _plan(plans["first"], config, devices, (f"sdp{devices}", f"tp{devices}"), precision)
    _plan(plans["second"], config, devices, (f"dp{devices}+zero2", f"sdp{devices}+rc"), precision)
    _plan(plans["half"], config, devices // 2, ("single",) if devices == 2 else (f"dp{devices // 2}",), precision)
    options = ["--steps", str(_STEPS), "--save-every", str(_SAVED), "--keep", "8"]
    log = folder / "log"

    def trained(name: str, plan: str, ranks: int, *more: str) -> tuple[subprocess.Popen[bytes], Path]:
        run = folder / name
        where = ["--virtual", str(ranks)] if args.virtual else ["--devices", str(ranks)]
        return _start([str(plans[plan]), *where, "--output", str(run), *more], log), run

    def note(what: str, **found: Any) -> None:
        line = json.dumps(
            {"run": what, "ranks": devices, "size": args.size, "precision": precision, "dropout": args.dropout, **found}
        )
        print(line, flush=True)
        with Path(args.out).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    for name in ("alone", "again"):
        process, run = trained(name, "first", devices, *options)
        first = _wait(process, run, 1, log)
        _wait(process, run, _STEPS, log)
        process.wait()
        if name == "again":
            note("the same again", until_new_step_s=first, **_difference(run, folder / "alone"))
    process, killed = trained("killed", "first", devices, *options)
    _wait(process, killed, _KILLED, log)
    _kill(process.pid)
    process.wait()
    for what, plan, ranks in (
        ("the same plan", "first", devices),
        ("another plan", "second", devices),
        ("half of the devices", "half", devices // 2),
    ):
        name = what.replace(" ", "-")
        shutil.copytree(killed, folder / name)
        process, run = trained(name, plan, ranks, "--resume")
        first = _wait(process, run, max(_metrics(run)) + 1, log)
        _wait(process, run, _STEPS, log)
        process.wait()
        note(what, until_new_step_s=first, **_difference(run, folder / "alone"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--virtual", type=int, help="ranks on one GPU")
    parser.add_argument("--devices", type=int, default=2, help="processes on CPUs")
    parser.add_argument("--size", choices=_SIZES, default="small")
    parser.add_argument("--dropout", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", default="benchmarks/results/killed_runs.jsonl")
    args = parser.parse_args()
    ranks = args.virtual or args.devices
    if ranks < 2 or ranks & (ranks - 1):
        parser.error(f"{ranks} ranks given; expected 2, 4, 8 …: the run goes on on half of them, too")
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder), args)


if __name__ == "__main__":
    main()
