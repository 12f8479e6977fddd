"""Exported weights are those of training: ``from_pretrained`` loads them, and nothing is missing or too much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from longer import longer
from oracle import _CLASSES, Case, batches, first_weights, stock_model
from parity import build, plan_for
from ranks import ranks
from resuming import optimizer_for
from safetensors.torch import load_file
from small_models import LAYERS, config
from torch import nn

import galvatron
from galvatron.train.checkpoints import export as exporting
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import export, export_model
from galvatron.train.checkpoints.folder import find


def _save(case: Case, plan: galvatron.Plan, weights: Path, folder: Path, direct: Path | None) -> None:
    """On a rank."""
    model = build(case, plan, weights)
    Checkpoints(folder).save(model, optimizer_for(case, model), {}, step=0, wait=True)
    if direct is not None:
        export_model(model, direct)


def _loaded(family: str, folder: Path) -> nn.Module:
    model, report = getattr(transformers, _CLASSES[family]).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert isinstance(model, nn.Module)
    return model.eval()


@pytest.mark.parametrize("family", [own if own in ("bert", "gpt2", "t5") else longer(own) for own in LAYERS])
def test_from_pretrained_loads_it(family: str, tmp_path: Path) -> None:
    """The same files, names and logits as the single process's own ``save_pretrained``."""
    strategies = ["tp4", "sdp4", "dp4", "sdp2-tp2", "tp2-dp2", "dp4+zero2", "sdp4"][: LAYERS[family]]
    case = Case(config=config(family), stages=[strategies], dtype=torch.float32)
    out, direct = tmp_path / "out", tmp_path / "direct"
    ranks(4).run(_save, case, plan_for(case), first_weights(case), tmp_path / "run", direct)
    export(find(tmp_path / "run"), out)
    batch = batches(case, steps=1)[0]
    with torch.no_grad():
        expected = stock_model(case).eval()(**batch).logits
        assert torch.equal(_loaded(family, out)(**batch).logits, expected)
    for file in ("model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (direct / file).read_bytes()
    theirs, ours = (load_file(path / "model.safetensors") for path in (first_weights(case), out))
    assert theirs.keys() == ours.keys()


def test_large_models_are_exported_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_SHARD_BYTES", 20_000)
    case = Case(config=config("gpt2"), stages=[["tp4", "sdp4", "dp4", "sdp4"]], dtype=torch.float32)
    ranks(4).run(_save, case, plan_for(case), first_weights(case), tmp_path / "run", None)
    export(find(tmp_path / "run"), tmp_path / "out")
    files = list((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    found = dict(_loaded("gpt2", tmp_path / "out").named_parameters())
    for name, own in stock_model(case).named_parameters():
        assert torch.equal(found[name], own), name


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    case = Case(config=config("vit"), stages=[["dp4"] * 4], dtype=torch.float32)
    ranks(4).run(_save, case, plan_for(case), first_weights(case), tmp_path / "run", None)
    with pytest.raises(galvatron.InvalidInput, match="not empty"):
        export(find(tmp_path / "run"), tmp_path / "out")
