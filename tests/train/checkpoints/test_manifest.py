"""A manifest that was changed and given a matching checksum is refused in one line, before any data is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from galvatron.core.errors import CheckpointCorrupt, GalvatronError
from galvatron.train.checkpoints.export import export
from galvatron.train.checkpoints.folder import find
from galvatron.train.checkpoints.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Chunk,
    Manifest,
    SavedOptimizer,
    SavedTensor,
    _digest,
)
from galvatron.train.checkpoints.report import verify_all

Content = dict[str, Any]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two tensors in one file, as a rank writes it."""
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    blocks = [bytes(range(24)), bytes(24), bytes(8)]
    (folder / "rank-00000.bin").write_bytes(b"".join(blocks))

    def chunk(number: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        digest = hashlib.sha256(blocks[number]).hexdigest()
        at = sum(map(len, blocks[:number]))
        return Chunk(
            offsets=offsets, sizes=sizes, file="rank-00000.bin", at=at, bytes=len(blocks[number]), sha256=digest
        )

    manifest = Manifest(
        version=FORMAT_VERSION,
        step=3,
        world=1,
        plan={
            "model": {
                "name": "bert-tiny",
                "family": "bert",
                "training": {},
                "config": {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1},
            }
        },
        seed=0,
        iteration=3,
        progress={},
        optimizer=SavedOptimizer(kind="AdamW", groups=({"lr": 1e-3},), group_of={"a.weight": 0}),
        files={"rank-00000.bin": 56},
        tensors={
            "model/a.weight": SavedTensor(
                dtype="float32", shape=(4, 3), chunks=(chunk(0, (0, 0), (2, 3)), chunk(1, (2, 0), (2, 3)))
            ),
            "optimizer/a.weight/exp_avg": SavedTensor(dtype="float32", shape=(2,), chunks=(chunk(2, (0,), (2,)),)),
        },
    )
    (folder / MANIFEST).write_text(manifest.text())
    return folder


def _tampered(folder: Path, change: Callable[[Content], object]) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_text(json.dumps({"sha256": _digest(content), "content": content}))


def _weight(content: Content) -> Content:
    tensor: Content = content["tensors"]["model/a.weight"]
    return tensor


def test_it_is_right_as_written(saved: Path) -> None:
    assert verify_all(find(saved)).step == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: _weight(c).update(shape=[4, 5]), "do not cover its shape"),
        (lambda c: _weight(c).update(shape=[3, 3]), "is not inside its shape"),
        (lambda c: _weight(c).update(shape=[-4, -3]), "its shape is"),
        (lambda c: _weight(c).update(shape=[2**40, 2**40]), "its shape is"),
        (lambda c: _weight(c).update(dtype="Tensor"), "its type 'Tensor'"),
        (lambda c: _weight(c).update(dtype="float64"), "has 24 bytes"),
        (lambda c: _weight(c)["chunks"].pop(), "do not cover its shape"),
        (lambda c: _weight(c)["chunks"][1].update(offsets=[1, 0]), "do not cover its shape"),
        (lambda c: _weight(c)["chunks"][1].update(offsets=[2]), "is not inside its shape"),
        (lambda c: _weight(c)["chunks"][1].update(at=-1), "is not inside rank-00000.bin"),
        (lambda c: _weight(c)["chunks"][1].update(at=50), "is not inside rank-00000.bin"),
        (lambda c: _weight(c)["chunks"][1].update(file="../../etc/passwd"), "which files does not name"),
        (lambda c: c["files"].update({"rank-00000.bin": 60}), "its blocks have 56"),
        (lambda c: c["files"].update({"/etc/passwd": 0}), "no data file of a checkpoint"),
        (lambda c: c["tensors"].update({"other/a": _weight(c)}), "no parameter, buffer or state"),
        (lambda c: c["tensors"].pop("model/a.weight"), "its blocks have 8"),
        (
            lambda c: c["tensors"].update({"optimizer/b/x": c["tensors"].pop("optimizer/a.weight/exp_avg")}),
            "no parameter",
        ),
        (lambda c: c["optimizer"].update(group_of={"a.weight": 7}), "group 7 is not one of 1"),
        (lambda c: c["plan"]["model"].update(family="nobody"), "'nobody', which is no family of models"),
        (lambda c: c["plan"].pop("model"), "plan.model has no name"),
        (lambda c: c["plan"]["model"].pop("training"), "plan.model.training is missing"),
        (lambda c: c["plan"]["model"].update(config=[]), "names no architecture"),
        (lambda c: c.update(world=0), "world is 0"),
        (lambda c: c.update(iteration=-1), "iteration is -1"),
        (lambda c: c.pop("seed"), "is no manifest of a checkpoint"),
    ],
)
def test_what_does_not_agree_is_refused(change: Callable[[Content], object], said: str, saved: Path) -> None:
    _tampered(saved, change)
    for use in (lambda: verify_all(find(saved)), lambda: export(find(saved), saved.parent / "out")):
        with pytest.raises(CheckpointCorrupt) as refused:
            use()
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_pipe_in_place_of_a_data_file_is_refused(saved: Path) -> None:
    (saved / "rank-00000.bin").unlink()
    os.mkfifo(saved / "rank-00000.bin")
    _tampered(saved, lambda c: _weight(c).update(shape=[4, 3]))
    with pytest.raises(CheckpointCorrupt, match="rank-00000"):
        verify_all(find(saved))
    from galvatron.train.checkpoints.manifest import read_chunk

    with pytest.raises(CheckpointCorrupt, match="is not a file"):
        read_chunk(saved, Manifest.read(saved).tensors["model/a.weight"].chunks[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: None, "a BertForMaskedLM has it, but the weights given do not"),
        (
            lambda c: c["plan"]["model"]["config"].update(num_hidden_layers="many"),
            "cannot build it from",
        ),
        (lambda c: c["plan"]["model"]["config"].update(model_type="nothing"), "nothing"),
    ],
)
def test_weights_of_another_model_are_not_exported(change: Callable[[Content], object], said: str, saved: Path) -> None:
    _tampered(saved, change)
    with pytest.raises(GalvatronError, match=said) as refused:
        export(find(saved), saved.parent / "out")
    assert "\n" not in str(refused.value)
    assert not (saved.parent / "out").exists()
