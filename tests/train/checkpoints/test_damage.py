"""A damaged checkpoint is never loaded: every rank names the file, and says which step is whole."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from longer import longer
from oracle import Case
from parity import build, plan_for
from ranks import ranks
from resuming import made
from small_models import config

import galvatron
from galvatron.core.errors import CheckpointCorrupt
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.folder import find
from galvatron.train.checkpoints.manifest import MANIFEST
from galvatron.train.checkpoints.report import verify_all

_CASE = Case(config=config("bert"), stages=[["tp4", "sdp4", "dp4", "sdp4"]], dtype=torch.float32)


def _save(plan: galvatron.Plan, folder: Path) -> None:
    """On a rank: two steps."""
    model, optimizer = made(_CASE, plan, None)
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, {}, step=1)
    checkpoints.save(model, optimizer, {}, step=2)
    checkpoints.finish()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks(4).run(_save, plan_for(_CASE), folder)
    return folder


def _file(folder: Path, number: int = 0) -> Path:
    return sorted((folder / "step-00000002").glob("rank-*.bin"))[number]


def _flip(folder: Path) -> Path:
    content = bytearray(_file(folder).read_bytes())
    content[len(content) // 2] ^= 1
    _file(folder).write_bytes(content)
    return _file(folder)


def _zero(folder: Path) -> Path:
    content = bytearray(_file(folder).read_bytes())
    content[4096:8192] = bytes(4096)
    _file(folder).write_bytes(content)
    return _file(folder)


def _truncate(folder: Path) -> Path:
    _file(folder, 2).write_bytes(_file(folder, 2).read_bytes()[:-10])
    return _file(folder, 2)


def _delete(folder: Path) -> Path:
    path = _file(folder, 1)
    path.unlink()
    return path


def _swap(folder: Path) -> Path:
    first, second = _file(folder, 0), _file(folder, 1)
    aside = folder / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return folder / "step-00000002" / "rank-0000"  # either of the two


def _edit(folder: Path) -> Path:
    """A number that still makes sense."""
    path = folder / "step-00000002" / MANIFEST
    content = json.loads(path.read_text())
    content["content"]["iteration"] += 1
    path.write_text(json.dumps(content))
    return path


def _cut_manifest(folder: Path) -> Path:
    path = folder / "step-00000002" / MANIFEST
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _load(plan: galvatron.Plan, folder: Path, step: int | None) -> str | int:
    """On a rank, under another plan: the error, or the step that was loaded."""
    model, optimizer = made(_CASE, plan, None)
    try:
        return Checkpoints(folder).load(model, optimizer, step).step
    except CheckpointCorrupt as error:
        return str(error)


_DAMAGES = [_flip, _zero, _truncate, _delete, _swap, _edit, _cut_manifest]


@pytest.mark.parametrize("damage", [own if own in (_flip, _delete, _cut_manifest) else longer(own) for own in _DAMAGES])
def test_damage_is_found_and_named(damage: Callable[[Path], Path], two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    path = str(damage(folder))
    plan = plan_for(Case(config=_CASE.config, stages=[["sdp4", "dp4", "tp4", "dp4+zero2"]], dtype=torch.float32))
    said = ranks(4).run(_load, plan, folder, None)
    assert len(set(said)) == 1, "all ranks say the same"
    assert path in said[0]
    assert said[0].endswith("load step 1 (step=1)")
    assert ranks(4).run(_load, plan, folder, 1) == [1] * 4
    with pytest.raises(CheckpointCorrupt) as error:
        verify_all(find(folder / "step-00000002"))
    assert path in str(error.value)
    verify_all(find(folder / "step-00000001"))


def _load_without_unpickling(plan: galvatron.Plan, folder: Path) -> int:
    """On a rank: what DCP would read its metadata and objects with is not there."""
    model, optimizer = made(_CASE, plan, None)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "load"), (pickle, "load")):
            patch.delattr(owner, name)
        return Checkpoints(folder).load(model, optimizer).step


def test_nothing_is_unpickled(two_steps: Path) -> None:
    """Files are a manifest in JSON and plain bytes."""
    assert ranks(4).run(_load_without_unpickling, plan_for(_CASE), two_steps) == [2] * 4
    found = {path.name for path in (two_steps / "step-00000002").iterdir()}
    assert found == {MANIFEST, *(f"rank-{rank:05}.bin" for rank in range(4))}


def test_copies_share_the_writing(two_steps: Path) -> None:
    """Each byte is written once, and no rank writes much more than its share."""
    sizes = [path.stat().st_size for path in (two_steps / "step-00000002").glob("rank-*.bin")]
    model = ranks(1).run(_whole_bytes)[0]
    assert sum(sizes) == model
    assert max(sizes) < 1.5 * model / 4


def _whole_bytes() -> int:
    case = Case(config=_CASE.config, stages=[["single"] * 4], dtype=torch.float32)
    return sum(parameter.nbytes for parameter in build(case, plan_for(case), None).parameters())
