"""A model with an encoder and a decoder, of no known family, runs under any plan and equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longer import longer
from parity import cluster_of
from ranks import ranks
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

import galvatron
from galvatron.core.spec import ONE_F_ONE_B
from galvatron.families.layer import IGNORED
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_RATE, _EPSILON, _STEPS = 1e-3, 1e-6, 3
_LAYERS = ["embedding", "encoder", "encoder", "bridge", "decoder", "decoder", "head"]


def _model() -> Any:
    torch.manual_seed(0)
    sizes: Any = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDES.items()}
    config = BartConfig(vocab_size=67, d_model=32, max_position_embeddings=32, dropout=0.0, **sizes)
    return BartForConditionalGeneration._from_config(config, attn_implementation="sdpa")


_SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def _batches() -> list[dict[str, Tensor]]:
    """Sources and targets of different lengths, with padding."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(_STEPS):
        ids, labels = (torch.randint(4, 67, (8, length), generator=generator) for length in (10, 7))
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        labels[2, 5:] = IGNORED
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def _one_process() -> tuple[list[float], dict[str, Tensor]]:
    model = _model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=_EPSILON)
    losses = []
    for batch in _batches():
        decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        logits = model(batch["input_ids"], batch["attention_mask"], decoder_ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        torch.testing.assert_close(loss, model(**batch).loss.double(), rtol=1e-5, atol=0)  # its own, in fp32
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: own.detach() for name, own in model.named_parameters()}


def _under(plan: galvatron.Plan) -> tuple[list[float], dict[str, Tensor]]:
    model = galvatron.parallelize(_model(), plan, dtype=torch.float64, device="cpu", check=False)
    optimizer = model.optimizer(torch.optim.AdamW, lr=_RATE, eps=_EPSILON)
    losses = []
    for batch in _batches():
        losses.append(float(model.forward_backward(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.whole_parameters())


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [
        longer([["sdp4", "dp4", "sdp4+rc", "dp4+zero2", "dp2-sdp2", "dp4+rc", "sdp4"]], 2),
        longer([["dp2", "sdp2", "dp2+rc"], ["sdp2", "dp2+rc", "dp2+zero2", "dp2"]], 2),  # the cut is before the bridge
        ([["single"] * 2, ["single"] * 2, ["single"], ["single"] * 2], 4),  # after it, and within the decoder
    ],
)
def test_equals_one_process(stages: list[list[str]], micro_batches: int) -> None:
    spec = galvatron.describe(_model(), _batches()[0])
    assert [layer.name for layer in spec.layers] == _LAYERS
    request: Any = Request(model=spec, cluster=cluster_of(4), batch=8, schedule=ONE_F_ONE_B)
    plan = priced(request, stages, micro_batches=micro_batches)
    expected_losses, expected = _one_process()
    for losses, parameters in ranks(4).run(_under, plan):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        assert parameters.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-7, atol=1e-9)
