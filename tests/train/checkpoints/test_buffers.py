"""Persistent buffers (the bias of a router, of a head): taken from a folder, kept in checkpoints under any
plan, and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from experts_oracle import MODELS
from longer import longer
from ranks import ranks
from torch import Tensor, nn

import galvatron
from galvatron.core.spec import Attention, Training
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.families.saved import load_buffers
from galvatron.families.weights import persistent_buffers
from galvatron.runtime.unpriced import facts_of, unpriced
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import export, export_model
from galvatron.train.checkpoints.folder import find

_BART = {
    "d_model": 16, "vocab_size": 40, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": MODELS["deepseek_v3"],
    "bart": {**_BART, "architectures": ["BartForConditionalGeneration"]},
}
_PLANS: dict[str, list[list[list[str]]]] = {
    "deepseek_v3": [[["dp4", "dp2-tp2", "sdp4/ep4", "dp4"]], [["dp2", "dp2"], ["tp2/ep2", "dp2"]]],
    "bart": [[["dp4", "sdp4", "dp4", "dp4", "dp4"]], [["dp2", "dp2"], ["sdp2", "dp2", "dp2"]]],
}
"""Saved under the first, loaded under the second."""
_TRAINING = Training(dropout=False, attention=Attention.FUSED)


def _stock(kind: str) -> Any:
    config = transformers.AutoConfig.for_model(kind, **_CONFIGS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, _CONFIGS[kind]["architectures"][0])._from_config(config, dtype=torch.float32)
        for own in [*model.parameters(), *persistent_buffers(model).values()]:
            own.data.add_(torch.randn_like(own))
    return model.eval()


def _plan(kind: str, stages: list[list[str]]) -> galvatron.Plan:
    config = {"model_type": kind, **_CONFIGS[kind]}
    layered = layered_model(build_meta(config, _TRAINING, as_named=True))
    plan = unpriced(replace(facts_of(layered, _TRAINING, kind), config=config), stages)
    return replace(plan, batch=8, micro_batches=2)


def _save(plan: galvatron.Plan, weights: Path, folder: Path, batch: dict[str, Tensor]) -> float:
    model = galvatron.parallelize(None, plan, weights=weights, device="cpu", check=False, dtype=torch.float32)
    Checkpoints(folder / "run").save(model, model.optimizer(lr=0.1), {}, step=0, wait=True)
    export_model(model, folder / "direct")
    return float(model.evaluate(batch))


def _load(plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]) -> float:
    model = galvatron.parallelize(None, plan, device="cpu", check=False, dtype=torch.float32)
    model.evaluate(batch).item()  # so that nothing is taken from before
    Checkpoints(folder / "run").load(model, None)
    return float(model.evaluate(batch))


@pytest.mark.parametrize("kind", ["deepseek_v3", longer("bart")])
def test_buffers_go_wherever_parameters_go(kind: str, tmp_path: Path) -> None:
    stock = _stock(kind)
    stock.save_pretrained(tmp_path / "stock")
    first, second = (_plan(kind, stages) for stages in _PLANS[kind])
    batch = layered_model(stock).example(8, 12, torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = float(stock(**batch).loss)
    assert ranks(4).run(_save, first, tmp_path / "stock", tmp_path, batch) == pytest.approx([expected] * 4, rel=1e-5)
    assert ranks(4).run(_load, second, tmp_path, batch) == pytest.approx([expected] * 4, rel=1e-5)
    export(find(tmp_path / "run"), tmp_path / "out")
    for folder in ("direct", "out"):
        found, report = type(stock).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        _assert_same(stock, found)


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    found = theirs.state_dict()
    assert persistent_buffers(ours).keys() <= found.keys()
    for name, own in ours.state_dict().items():
        assert torch.equal(own, found[name]), name


def test_a_folder_of_another_shape_is_refused(tmp_path: Path) -> None:
    stock = _stock("deepseek_v3")
    name, own = next(iter(persistent_buffers(stock).items()))
    path, _, key = name.rpartition(".")
    setattr(stock.get_submodule(path), key, torch.zeros(len(own) + 1))
    stock.save_pretrained(tmp_path)
    with pytest.raises(galvatron.InvalidInput, match=rf"{name} has shape \[9\]; expected \[8\]"):
        load_buffers(_stock("deepseek_v3"), tmp_path)
