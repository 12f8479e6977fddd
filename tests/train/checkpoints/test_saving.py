"""What a training program may do around saving, and what goes wrong there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Case, batches, first_weights
from parity import build, plan_for
from ranks import ranks
from resuming import made, optimizer_for, step
from small_models import config
from torch import Tensor

import galvatron
from galvatron.core.errors import GalvatronError
from galvatron.core.spec import Training
from galvatron.train.checkpoints import storage
from galvatron.train.checkpoints.checkpoints import Checkpoints

_CASE = Case(config=config("gpt2"), stages=[["dp4", "sdp4", "tp4", "dp2-tp2"]], dtype=torch.float32)


def _train(
    case: Case, plan: galvatron.Plan, weights: Path, given: Sequence[dict[str, Tensor]], folder: Path | None
) -> tuple[list[float], dict[str, Tensor]]:
    """On a rank: all batches in one go, or in two halves of which the second starts from the first's checkpoint."""
    half = len(given) // 2
    model, optimizer = made(case, plan, weights)
    losses = [step(model, optimizer, batch) for batch in given[:half]]
    if folder is not None:
        Checkpoints(folder).save(model, optimizer, {"batch": half}, step=half, wait=True)
        model = galvatron.parallelize(None, plan, dtype=case.dtype, device="cpu", seed=7)  # the seed is restored too
        optimizer = optimizer_for(case, model)
        assert Checkpoints(folder).load(model, optimizer).progress == {"batch": half}
    losses += [step(model, optimizer, batch) for batch in given[half:]]
    return losses, {name: own.clone() for name, own in model.whole_parameters()}


def _raised(call: Any) -> str | None:
    try:
        call()
    except GalvatronError as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_four_and_four_steps_are_eight(tmp_path: Path) -> None:
    """With dropout: losses and parameters are the same bit for bit."""
    dropping = config("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
    case = replace(_CASE, batch=8, config=dropping, training=Training(dropout=True))
    arguments = (case, plan_for(case), first_weights(case), batches(case, steps=8))
    expected = ranks(4).run(_train, *arguments, None)
    found = ranks(4).run(_train, *arguments, tmp_path)
    for (losses, parameters), (losses_then, parameters_then) in zip(expected, found, strict=True):
        assert losses == losses_then
        assert all(torch.equal(own, parameters_then[name]) for name, own in parameters.items())


def _keeping(plan: galvatron.Plan, folder: Path) -> list[list[str]]:
    """On a rank: which folders are there after each of some saves."""
    model, optimizer = made(_CASE, plan, None)
    seen = []
    for number in (1, 2, 3, 4, 4, 2, 3, 5):
        if number == 3 and model.rank == 0:
            (folder / "step-00000009.partial").mkdir()
        checkpoints = Checkpoints(folder, keep=2)
        checkpoints.save(model, optimizer, {}, step=number, wait=True)
        seen.append(sorted(path.name for path in folder.iterdir()))
        assert [saved.step for saved in checkpoints.all()][-1] == number
        newest = checkpoints.latest()
        assert newest is not None
        assert checkpoints.load(model, None).step == number == newest.step
    return seen


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    """Leftovers go; a step that is saved again takes the place of the first; going back sets later ones aside until the
    run has come so far again."""
    for seen in ranks(4).run(_keeping, plan_for(_CASE), tmp_path):
        assert seen == [
            ["step-00000001"],
            ["step-00000001", "step-00000002"],
            ["step-00000002", "step-00000003"],
            ["step-00000003", "step-00000004"],
            ["step-00000003", "step-00000004.2"],
            ["step-00000002", "step-00000003.abandoned", "step-00000004.2.abandoned"],
            ["step-00000002", "step-00000003", "step-00000004.2.abandoned"],
            ["step-00000003", "step-00000005"],
        ]


@contextmanager
def _full_disk(_: Path) -> Iterator[None]:
    """Nothing more can be written by this rank."""

    def refuse(_: Tensor) -> memoryview:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "as_bytes", refuse)
        yield


@contextmanager
def _in_the_way(folder: Path) -> Iterator[None]:
    """A file has the name of the folder to be written."""
    (folder / "step-00000002.partial").touch()
    yield
    (folder / "step-00000002.partial").unlink()


def _failing(
    plan: galvatron.Plan, folder: Path, obstacle: Callable[[Path], AbstractContextManager[None]]
) -> tuple[str | None, list[int], list[int]]:
    """On a rank: a save that fails in the background because of rank 2; what is said, and which steps are there then
    and later."""
    model, optimizer = made(_CASE, plan, None)
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, {}, step=1, wait=True)
    with obstacle(folder) if model.rank == 2 else nullcontext():
        dist.barrier()
        checkpoints.save(model, optimizer, {}, step=2)
        said = _raised(checkpoints.finish)
        steps = [saved.step for saved in checkpoints.all()]
        dist.barrier()
    dist.barrier()
    checkpoints.save(model, optimizer, {}, step=3, wait=True)
    return said, steps, [saved.step for saved in checkpoints.all()]


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        (_full_disk, "rank 2 cannot write {}/step-00000002.partial/rank-00002.bin: No space left on device"),
        (_in_the_way, "rank 0 cannot write {}/step-00000002.partial: Not a directory"),
    ],
)
def test_a_failed_save_is_told_to_all(
    obstacle: Callable[[Path], AbstractContextManager[None]], words: str, tmp_path: Path
) -> None:
    """By the next call, on every rank; nothing hangs, the step before stays, and the next save works."""
    for said, then, later in ranks(4).run(_failing, plan_for(_CASE), tmp_path, obstacle):
        assert said is not None
        assert said.startswith("SaveFailed: step 2 was not saved")
        assert words.format(tmp_path) in said
        assert then == [1]
        assert later == [1, 3]


def _refused(plan: galvatron.Plan, folder: Path) -> dict[str, str | None]:
    """On a rank: loads that must not work."""
    model, optimizer = made(_CASE, plan, None)
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, {}, step=1, wait=True)
    wide = build(replace(_CASE, dtype=torch.float64), plan, None)
    other = replace(_CASE, config=config("gpt2", n_embd=64))
    return {
        "optimizer": _raised(lambda: checkpoints.load(model, torch.optim.SGD(model.parameters(), lr=1.0))),
        "dtype": _raised(lambda: checkpoints.load(wide, None)),
        "model": _raised(lambda: checkpoints.load(build(other, plan_for(other), None), None)),
        "step": _raised(lambda: checkpoints.load(model, None, step=5)),
        "empty": _raised(lambda: Checkpoints(folder / "none").load(model, None)),
        "progress": _raised(lambda: checkpoints.save(model, optimizer, {"at": float("nan")}, step=2)),
        "keep": _raised(lambda: Checkpoints(folder, keep=0)),
        "fine": _raised(lambda: checkpoints.load(model, None)),
    }


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    expected = {
        "optimizer": "SGD given; the checkpoint has the state of AdamW",
        "dtype": "the checkpoint has float32",
        "model": "transformer.wte.weight: [67, 64] in the model, [67, 32] in the checkpoint",
        "step": "complete steps: 1",
        "empty": "none",
        "progress": "JSON",
        "keep": "at least 1",
    }
    for said in ranks(4).run(_refused, plan_for(_CASE), tmp_path):
        assert said.pop("fine") is None
        assert said.keys() == expected.keys()
        for name, words in expected.items():
            error = said[name]
            assert error is not None, name
            assert error.startswith("InvalidInput: ")
            assert words in error
