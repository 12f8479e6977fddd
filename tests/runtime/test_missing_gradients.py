"""Experts that none of a rank's rows choose have no gradient there: the ranks still sum the same, in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import cluster_of
from ranks import ranks
from torch import Tensor, nn

import galvatron
from galvatron.core.spec import ONE_F_ONE_B, LayerSpec, Precision, Training
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request


class _Block(nn.Module):
    """The number of a row's first token decides which expert sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, hidden: Tensor, choice: Tensor) -> Tensor:
        made = hidden.clone()
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                made = made.index_add(0, rows, expert(hidden[rows]))
        return made


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([_Block() for _ in range(3)])
        self.out = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, tokens[:, 0] if number != 1 else 1 - tokens[:, 0])
        logits: Tensor = self.out(hidden)
        return logits


def _model(frozen: str) -> nn.Module:
    torch.manual_seed(0)
    model = _Model()
    for name, own in model.named_parameters():
        own.requires_grad_(not frozen or not name.startswith(frozen))
    return model


def _batch() -> dict[str, Tensor]:
    """Under two ranks, in each of two micro-batches, the first has rows of both experts, the second of one."""
    tokens = torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = torch.tensor([0, 1, 1, 1] * 2)
    return {"tokens": tokens, "labels": tokens.flip(1)}


def _gradients(plan: galvatron.Plan, frozen: str) -> dict[str, Tensor]:
    model = galvatron.parallelize(_model(frozen), plan, example=_batch(), device="cpu", check=False)
    float(model.forward_backward(_batch()))
    return {name: own.clone() for name, own in model.whole_gradients()}


@pytest.mark.parametrize(
    ("strategy", "frozen"), [("dp2", ""), ("sdp2", ""), ("sdp2+rc", ""), ("dp2+zero2", ""), ("sdp2", "words")]
)
def test_gradients_are_those_of_one_process(strategy: str, frozen: str) -> None:
    """Also where the first layer that trains has such experts, so that no gradient leaves it."""
    alone: Any = _model(frozen)
    batch = _batch()
    loss = nn.functional.cross_entropy(alone(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    torch.autograd.backward(loss)
    spec = galvatron.ModelSpec(**_facts())
    request = Request(model=spec, cluster=cluster_of(2), batch=8, schedule=ONE_F_ONE_B)
    plan = priced(request, [[strategy] * 5], micro_batches=2)
    for found in ranks(2).run(_gradients, plan, frozen):
        for name, own in alone.named_parameters():
            expected = torch.zeros_like(own) if own.grad is None else own.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)


def _facts() -> dict[str, Any]:
    """The model cannot be traced without values, so its layers are written down."""

    def layer(name: str, parameters: int) -> LayerSpec:
        return LayerSpec(
            name=name, parameters=parameters, forward_flops=1, split_activation_bytes=0, boundary_bytes=4,
            replicated_parameters=parameters,
        )  # fmt: skip

    layers = (layer("embedding", 80), *[layer("block", 144)] * 3, layer("head", 90))
    training = Training(precision=Precision.FP32)
    return {"name": "experts", "family": "generic", "layers": layers, "training": training}
