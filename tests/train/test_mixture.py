"""A mixture of experts from a folder to a folder: planned, trained, stopped, gone on with under another degree of EP,
exported. Its loss has a term for the balance of experts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from injecting import fail_at, stop_if_settled
from jobs import Job, run_to_end
from longer import longer
from oracle import stock_loss
from parity import cluster_of
from transformers import MixtralConfig, MixtralForCausalLM

import galvatron
from galvatron.core.spec import Precision, Training
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.train.checkpoints.export import export
from galvatron.train.checkpoints.folder import find
from galvatron.train.data.loader import Loader
from galvatron.train.data.opening import open_data
from galvatron.train.settings import Decay, Settings

_STEPS, _STOPPED, _BATCH, _SEED = 6, 3, 8, 3
_COMPARED = 2
"""Batches that a tiny copy is compared with before it trains."""
_TRAINING = Training(precision=Precision.FP32, dropout=False, sequence_length=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = MixtralConfig(
        vocab_size=67, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, max_position_embeddings=32, num_local_experts=4, output_router_logits=True,
        router_aux_loss_coef=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("mixture") / "mixtral"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(path)
    return path


def _plan(folder: Path, strategies: list[str]) -> galvatron.Plan:
    """By hand, for a model that is traced."""
    devices = int(strategies[0].removeprefix("dp").removeprefix("s"))
    request = Request(model=load_any_model(folder, _TRAINING), cluster=cluster_of(devices), batch=_BATCH)
    return priced(request, [strategies], micro_batches=1)


@cache
def _alone(folder: Path) -> tuple[list[float], Any]:
    """The stock model, trained by PyTorch's own parts on the same samples."""
    model: Any = MixtralForCausalLM.from_pretrained(folder)
    decayed = [{"params": [own for own in model.parameters() if (own.ndim > 1) is matrix]} for matrix in (True, False)]
    optimizer = torch.optim.AdamW([decayed[0] | {"weight_decay": 0.01}, decayed[1] | {"weight_decay": 0.0}], lr=1e-3)
    content = _plan(folder, ["dp2"] * 4).model
    assert content.config is not None
    data = open_data(None, content.config, content.training, seed=_SEED)
    losses = []
    for _, batch in zip(range(_STEPS), Loader(data.train, batch=_BATCH, seed=_SEED), strict=False):
        loss = stock_loss(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("first", "then"),
    [
        longer(["dp2", "dp2/ep2", "sdp2/ep2", "dp2"], ["dp2", "dp2", "dp2/ep2", "sdp2"]),
        longer(["dp4", "dp4/ep4", "sdp4/sdp2-ep2", "dp4"], ["dp2", "dp2/ep2", "sdp2/ep2", "dp2"]),
    ],
)
def test_from_a_folder_to_a_folder(folder: Path, tmp_path: Path, first: list[str], then: list[str]) -> None:
    settings = Settings(
        steps=_STEPS, learning_rate=1e-3, decay=Decay.CONSTANT, seed=_SEED, weights=str(folder), clip=0.5
    )
    run = tmp_path / "run"
    job = Job(run, _plan(folder, first), settings, fail_at, 0, _COMPARED + _STOPPED - 1, stop_if_settled)
    assert job.wait() == [0] * job.world, job.logs()
    assert len(job.losses()) == _STOPPED
    losses, stock = _alone(folder)
    assert run_to_end(run, _plan(folder, then), settings).losses() == pytest.approx(losses, abs=1e-4)
    export(find(run), tmp_path / "out")
    kind: Any = MixtralForCausalLM
    exported, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    found = dict(exported.named_parameters())
    for name, own in stock.named_parameters():
        torch.testing.assert_close(found[name], own, rtol=1e-3, atol=1e-4)
