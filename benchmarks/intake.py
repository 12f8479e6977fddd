"""The intake: every architecture of transformers with a head that trains, planned for and run under each kind of
strategy on two processes, compared with the stock model in one.

    python benchmarks/intake.py --workers 14                 # goes on where it stopped; a few minutes on 16 cores
    python benchmarks/intake.py --only MistralForCausalLM    # some of them, anew
    python benchmarks/intake.py --weights --only …           # weights from a folder, and exported: apart from the rest
    python benchmarks/intake.py --narrow                     # a step in bf16 under five plans: apart from the rest
    python benchmarks/intake.py --report                     # the tables again, into docs/models.md

Each architecture runs in a process group of its own, forked from this process, which has imported torch and
transformers: a crash or a hang costs only itself. Results are appended to a file as they come; the last line of an
architecture counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a process with threads cannot be forked safely
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from intake_table import read, write_report

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results" / "intake.jsonl"
_WEIGHT_RESULTS = Path(__file__).parent / "results" / "intake_weights.jsonl"
_NARROW_RESULTS = Path(__file__).parent / "results" / "intake_narrow.jsonl"
_DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
_PAUSE_S = 0.05


@dataclass(slots=True)
class _Running:
    name: str
    process: int
    answer: int
    """The pipe's end to read from."""
    end: float
    said: bytes = b""

    def listen(self) -> None:
        """Take what it has said so far."""
        with suppress(BlockingIOError):
            while part := os.read(self.answer, 1 << 16):
                self.said += part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these classes, whether finished or not")
    parser.add_argument("--workers", type=int, default=1, help="architectures at a time (each has two processes)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one architecture")
    parser.add_argument("--weights", action="store_true", help="load the stock model's folder and export it again")
    parser.add_argument("--narrow", action="store_true", help="a step in bf16 under five plans")
    parser.add_argument("--output", type=Path, help="where results go")
    parser.add_argument("--document", type=Path, default=_DOCUMENT, help="where the tables go")
    parser.add_argument("--report", action="store_true", help="write the tables only")
    arguments = parser.parse_args()
    apart = _WEIGHT_RESULTS if arguments.weights else _NARROW_RESULTS if arguments.narrow else None
    arguments.output = arguments.output or apart or _RESULTS
    if not arguments.report:
        _run(arguments)
    if arguments.report or not (arguments.only or apart):
        write_report(read(arguments.output), arguments.document)


def _run(arguments: argparse.Namespace) -> None:
    _preload()
    from intake_models import architectures

    known = architectures()
    unknown = [name for name in arguments.only or () if name not in known]
    if unknown:
        sys.exit(f"error: --only {unknown[0]}: not among the {len(known)} classes of transformers that are looked at")
    done = set(read(arguments.output))
    names = deque(arguments.only or [name for name in known if name not in done])
    total, running = len(names), list[_Running]()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a", encoding="utf-8") as output:
        while names or running:
            while names and len(running) < arguments.workers:
                running.append(_start(names.popleft(), arguments))
            for one in list(running):
                row = _result(one)
                if row is not None:
                    running.remove(one)
                    row = {"architecture": one.name, "head": known[one.name].head} | row
                    output.write(json.dumps(row) + "\n")
                    output.flush()
                    _say(row, total - len(names) - len(running), total)
            time.sleep(_PAUSE_S)


def _preload() -> None:
    """Import what every architecture needs, and start no thread."""
    import torch
    import torch._dynamo
    import transformers.modeling_utils
    from torch.distributed import fsdp  # noqa: F401

    import galvatron.measure.describe
    import galvatron.planner.plan.advice
    import galvatron.runtime.parallelize  # noqa: F401
    import intake_narrow  # noqa: F401
    import intake_weights  # noqa: F401

    torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]  # it has threads of its own
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _start(name: str, arguments: argparse.Namespace) -> _Running:
    answer, own = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(answer)
            os.setsid()
            _child(name, own, arguments)
            status = 0
        finally:
            os._exit(status)
    os.close(own)
    os.set_blocking(answer, False)
    return _Running(name, process, answer, time.monotonic() + arguments.timeout)


def _child(name: str, answer: int, arguments: argparse.Namespace) -> None:
    import warnings

    from intake_models import architectures
    from intake_narrow import examine_narrow
    from intake_run import examine
    from intake_weights import examine_weights

    warnings.simplefilter("ignore")
    work = examine_weights if arguments.weights else examine_narrow if arguments.narrow else examine
    row = work(architectures()[name])
    with os.fdopen(answer, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(row))


def _result(one: _Running) -> dict[str, Any] | None:
    """What it said, once it has ended or its time is up; None: not yet."""
    one.listen()
    ended, status = os.waitpid(one.process, os.WNOHANG)
    late = time.monotonic() > one.end
    if not ended and not late:
        return None
    with suppress(ProcessLookupError):
        os.killpg(one.process, signal.SIGKILL)  # its ranks too
    if not ended:
        os.waitpid(one.process, 0)
    one.listen()
    os.close(one.answer)
    try:
        row: dict[str, Any] = json.loads(one.said)
    except ValueError:
        why = "it took too long" if late else f"its process ended with status {status}"
        return {"columns": {}, "crashed": why}
    return row


def _say(row: dict[str, Any], done: int, total: int) -> None:
    columns = {name: own["outcome"] for name, own in row["columns"].items()}
    short = " ".join(f"{name}={outcome}" for name, outcome in columns.items()) or row["crashed"]
    print(f"{done}/{total} {row['architecture']} {row.get('seconds', '')}s {short}", flush=True)


if __name__ == "__main__":
    main()
