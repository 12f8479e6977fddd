"""SIGKILL at any instant of a save leaves the last complete checkpoint, and never a mixture of two."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from longer import longer
from oracle import Case
from parity import build, plan_for
from ranks import Ranks, ranks
from small_models import config
from torch.optim import SGD, Optimizer

import galvatron
from galvatron.runtime.model import ParallelModel
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import _whole
from galvatron.train.checkpoints.folder import Saved, complete
from galvatron.train.checkpoints.report import verify_all

_CASE = Case(config=config("vit"), stages=[["sdp2", "tp2", "dp2", "sdp2"]], dtype=torch.float32)


def _filled(plan: galvatron.Plan) -> tuple[ParallelModel, Optimizer]:
    model = build(_CASE, plan, None)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return model, optimizer


@dataclass(frozen=True)
class _Instant:
    """When a rank is killed: before it executes the n-th line of a function, in one save or a later one."""

    rank: int
    function: str
    line: int
    both: bool
    """The other rank in the same moment, or not at all."""

    def arm(self) -> None:
        """On each rank."""
        victims: list[int] = [0, 0]
        dist.all_gather_object(victims, os.getpid())
        if dist.get_rank() != self.rank:
            return
        left = self.line

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_name != self.function or "galvatron" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if left == 0:
                for victim in (victims[1 - self.rank],) * self.both + (os.getpid(),):
                    os.kill(victim, signal.SIGKILL)
            return trace

        threading.settrace(trace)


def _save_for_ever(plan: galvatron.Plan, folder: Path, log: Path, instant: _Instant) -> None:
    """On a rank: step n has n everywhere. The log tells which saves were done."""
    model, optimizer = _filled(plan)
    checkpoints = Checkpoints(folder, keep=2)
    latest = checkpoints.latest()
    instant.arm()
    for number in itertools.count(0 if latest is None else latest.step + 1):
        for parameter in model.parameters():
            parameter.detach().fill_(number)
            optimizer.state[parameter]["momentum_buffer"].fill_(number)
        checkpoints.save(model, optimizer, {"number": number}, step=number, wait=True)
        if model.rank == 0:
            with log.open("a") as file:
                file.write(f"{number}\n")


def _check(saved: Saved) -> None:
    """Whole, undamaged, and of one step through and through."""
    manifest = verify_all(saved)
    assert manifest.progress == {"number": saved.step}
    assert len(manifest.tensors) == 2 * len(manifest.parameters)
    for key, tensor in manifest.tensors.items():
        assert torch.equal(_whole(saved.path, tensor), torch.full(tensor.shape, float(saved.step))), key


_LINES = {"begin": 8, "write_data": 300, "finish": 300, "commit": 12, "tidy": 20}
"""Functions of a save in their order, and about how many lines each of them executes."""


def _instants(kills: int) -> list[_Instant]:
    """Every fifth in the same function. Rank 0 runs all of them, the other one only writes."""
    draw = random.Random(3)
    return [
        _Instant(
            rank=1 if function == "write_data" and trial % 2 else 0,
            function=function,
            line=draw.randrange(1, _LINES[function] + 1),
            both=trial % 3 == 0,
        )
        for trial, function in zip(range(kills), itertools.cycle(_LINES), strict=False)
    ]


@pytest.mark.parametrize("kills", [5, longer(20)])
def test_killed_at_any_instant(tmp_path: Path, kills: int) -> None:
    """Both of two ranks, or one of them: then the other one says that its save failed, and does not wait for ever."""
    folder, log = tmp_path / "run", tmp_path / "log"
    log.touch()
    plan, interrupted = plan_for(_CASE), 0
    for instant in _instants(kills):
        pair = Ranks(2)
        pair._start()
        for pipe in pair._pipes:
            pipe.send_bytes(pickle.dumps((_save_for_ever, (plan, folder, log, instant))))
        pair._processes[instant.rank].join(60)
        assert pair._processes[instant.rank].exitcode == -signal.SIGKILL
        if not instant.both:
            assert pair._pipes[1 - instant.rank].poll(60)
            assert "SaveFailed: step" in str(pickle.loads(pair._pipes[1 - instant.rank].recv_bytes()))
        pair.stop()
        found, done = complete(folder), [int(line) for line in log.read_text().splitlines()]
        assert (found[-1].step if found else -1) >= (done[-1] if done else -1), "a save that was done is there"
        for saved in found:
            _check(saved)
        interrupted += any(path.suffix in (".partial", ".deleted") for path in folder.glob("step-*"))
    assert interrupted > kills // 4
    assert set(ranks(4).run(_load, folder)) == {found[-1].step}


def _load(folder: Path) -> int:
    """On another rank of another plan."""
    case = Case(config=_CASE.config, stages=[["dp4", "sdp4", "tp4", "dp2-sdp2"]], dtype=torch.float32)
    model, optimizer = _filled(plan_for(case))
    step = Checkpoints(folder).load(model, optimizer).step
    for parameter in model.parameters():
        for tensor in (parameter, optimizer.state[parameter]["momentum_buffer"]):
            assert torch.equal(tensor, torch.full_like(tensor, step))
    return step
