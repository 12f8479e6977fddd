"""SIGKILL at any instant of a save leaves the last complete checkpoint, and never a mixture of two."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from pathlib import Path

import torch
from oracle import Case
from parity import build, plan_for
from ranks import Ranks, ranks
from small_models import config
from torch.optim import SGD, Optimizer

import galvatron
from galvatron.checkpoints.checkpoints import Checkpoints
from galvatron.checkpoints.export import _whole
from galvatron.checkpoints.folder import Saved, complete
from galvatron.checkpoints.verify import verify
from galvatron.runtime.model import ParallelModel

_CASE = Case(config=config("vit"), stages=[["sdp2", "tp2", "dp2", "sdp2"]], dtype=torch.float32)
_INSTANTS = 20


def _filled(plan: galvatron.Plan) -> tuple[ParallelModel, Optimizer]:
    model = build(_CASE, plan, None)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return model, optimizer


def _save_for_ever(plan: galvatron.Plan, folder: Path, log: Path) -> None:
    """On a rank that will be killed: step n has n everywhere. The log tells which saves were done."""
    model, optimizer = _filled(plan)
    checkpoints = Checkpoints(folder, keep=2)
    latest = checkpoints.latest()
    for number in itertools.count(0 if latest is None else latest.step + 1):
        for parameter in model.parameters():
            parameter.detach().fill_(number)
            optimizer.state[parameter]["momentum_buffer"].fill_(number)
        checkpoints.save(model, optimizer, {"number": number}, step=number, wait=True)
        if model.rank == 0:
            with log.open("a") as file:
                file.write(f"{number}\n")


def _done(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


def _check(saved: Saved) -> None:
    """Whole, undamaged, and of one step through and through."""
    manifest = verify(saved)
    assert manifest.progress == {"number": saved.step}
    assert len(manifest.tensors) == 2 * len(manifest.parameters)
    for key, tensor in manifest.tensors.items():
        assert torch.equal(_whole(saved.path, tensor), torch.full(tensor.shape, float(saved.step))), key


def test_killed_at_any_instant(tmp_path: Path) -> None:
    """Sometimes one of the two is killed a little before the other."""
    folder, log = tmp_path / "run", tmp_path / "log"
    log.touch()
    plan, instants = plan_for(_CASE), random.Random(3)
    unfinished = 0
    for trial in range(_INSTANTS):
        pair, before = Ranks(2), len(_done(log))
        pair._start()
        for pipe in pair._pipes:
            pipe.send_bytes(pickle.dumps((_save_for_ever, (plan, folder, log))))
        for _ in range(3000):
            if len(_done(log)) > before:
                break
            time.sleep(0.01)
        time.sleep(instants.uniform(0, 0.1))
        if trial % 4 == 0:
            pair._processes[trial // 4 % 2].kill()
            time.sleep(instants.uniform(0, 0.02))
        pair.stop()
        found = complete(folder)
        assert found[-1].step >= _done(log)[-1], "a save that was done is there"
        for saved in found:
            _check(saved)
        unfinished += any(path.suffix == ".partial" for path in folder.iterdir())
    assert unfinished >= _INSTANTS // 4, "saves were really interrupted"
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
