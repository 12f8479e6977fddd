"""Rehearses ranks one after another, each in a fresh process: its memory and its process group are its own.

Everything that can be wrong with the request is found here, before any of them starts.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.measure.rehearsal.results import Measured, Rehearsal
from galvatron.planner.plan.plan import Plan
from galvatron.processes.environment import defaults_if_unset

__all__ = ["Job", "first_ranks", "rehearse"]

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a process is to rehearse."""

    plan: Plan
    rank: int
    device: str
    steps: int


def first_ranks(plan: Plan) -> list[int]:
    """One of each stage."""
    return [stage.devices[0] for stage in plan.stages]


def rehearse(plan: Plan, ranks: Sequence[int], *, device: str | None = None, steps: int = 3) -> list[Rehearsal]:
    """Run these ranks' shares of the plan by themselves; ``device`` None: a GPU where there is one."""
    _check(plan, ranks, steps)
    where = _device(device)
    jobs = [Job(plan=plan, rank=rank, device=where, steps=steps) for rank in ranks]
    return [Rehearsal.of(plan, job.rank, job.device, _run(job)) for job in jobs]


def _check(plan: Plan, ranks: Sequence[int], steps: int) -> None:
    """Refuse what cannot be rehearsed."""
    if plan.model.config is None:
        raise InvalidInput(
            f"model.config: null in this plan, because {plan.model.name!r} was described by figures alone, so there is "
            "nothing to run; plan a model from a preset or a Hugging Face configuration"
        )
    for rank in ranks:
        if not 0 <= rank < plan.cluster.devices:
            raise InvalidInput(f"rank: {rank} given; the plan has ranks 0 to {plan.cluster.devices - 1}")
    if steps < 1:
        raise InvalidInput(f"steps: {steps} given; expected at least 1 iteration to take the time of")


def _device(asked: str | None) -> str:
    """The device asked for, or a GPU where there is one."""
    import torch  # only now, because it takes seconds

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in _DEVICES:
        raise InvalidInput(f"device: {asked!r} given; expected one of {', '.join(_DEVICES)}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device: 'cuda' given, but PyTorch sees no GPU here; use 'cpu' (--device cpu)")
    return asked


def _run(job: Job) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        done = subprocess.run(
            [sys.executable, "-m", "galvatron.measure.rehearsal", str(answer)],
            input=pickle.dumps(job),
            env={**os.environ, **defaults_if_unset()},
            capture_output=True,
            check=False,
        )
        if done.returncode or not answer.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise GalvatronError(
                f"rank {job.rank}: its process ended with status {done.returncode} on {job.device}: {said[-1]}"
            )
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, GalvatronError):
        raise result
    assert isinstance(result, Measured)
    return result
