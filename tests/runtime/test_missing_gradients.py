"""Experts that none of a rank's rows choose have no gradient there: the ranks still sum the same, in one order. Those
that nobody's rows choose have none at all, so that no optimizer moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longer import longer
from parity import cluster_of
from ranks import ranks
from torch import Tensor, nn

import galvatron
from galvatron.core.spec import ONE_F_ONE_B, LayerSpec, Precision, Training
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.train.checkpoints.checkpoints import Checkpoints


class _Block(nn.Module):
    """The number of a row's first token decides which expert sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

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


def _batch(choices: tuple[int, ...] = (0, 1, 1, 1)) -> dict[str, Tensor]:
    """Under two ranks, in each of two micro-batches, the first has rows of both experts, the second of one. Nobody
    chooses the third."""
    tokens = torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = torch.tensor(choices * 2)
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
    for found in ranks(2).run(_gradients, _plan([[strategy] * 5]), frozen):
        for name, own in alone.named_parameters():
            expected = torch.zeros_like(own) if own.grad is None else own.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)


_STEPS = ((0, 1, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 1, 1))
"""What rows choose: in the second and third step nobody chooses one of the experts that had a gradient before."""
_ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5, "eps": 1e-3}


def _trained(
    plan: galvatron.Plan, folder: Path, first: int, last: int, accumulate: int
) -> tuple[dict[str, Tensor], set[str]]:
    """On a rank: from a checkpoint of so many steps, or the start. Weights, and what the last step gave no gradient."""
    model = galvatron.parallelize(_model(""), plan, example=_batch(), device="cpu", check=False, dtype=torch.float64)
    optimizer = model.optimizer(**_ADAMW)
    kept = Checkpoints(folder)
    if first:
        kept.load(model, optimizer)
    missing = set[str]()
    for choices in _STEPS[first:last]:
        for _ in range(accumulate):
            float(model.forward_backward(_batch(choices)))
        missing = {name for name, own in model.named_parameters() if own.grad is None}
        optimizer.step()
        optimizer.zero_grad()
    if last < len(_STEPS):
        kept.save(model, optimizer, {}, step=last, wait=True)
    return {name: own.clone() for name, own in model.whole_parameters()}, missing


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        *(("dp2", 2), ("sdp2", 1), ("sdp2+rc", 2), ("dp2+zero2", 1)),
        *(longer("dp2", 1), longer("sdp2", 2), longer("sdp2+rc", 1), longer("dp2+zero2", 2)),
    ],
)
def test_what_nobody_chose_is_left_alone(strategy: str, accumulate: int, tmp_path: Path) -> None:
    """AdamW decays weights, and goes on by earlier gradients, where there is one of zeros; also on from a checkpoint,
    which has no state of what never had a gradient, under another plan."""
    alone = _model("").double()
    optimizer = torch.optim.AdamW(alone.parameters(), **_ADAMW)
    missing = set[str]()
    for choices in _STEPS:
        for _ in range(accumulate):
            batch = _batch(choices)
            logits: Tensor = alone(batch["tokens"])
            torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        missing = {name for name, own in alone.named_parameters() if own.grad is None}
        optimizer.step()
        optimizer.zero_grad()
    assert {name.split(".")[3] for name in missing} == {"2"}
    plans = [_plan([[own] * 5]) for own in (strategy, "sdp2" if strategy == "dp2" else "dp2")]
    ranks(2).run(_trained, plans[0], tmp_path, 0, 2, accumulate)
    for (found, without), (again, _) in zip(
        ranks(2).run(_trained, plans[0], tmp_path / "other", 0, len(_STEPS), accumulate),
        ranks(2).run(_trained, plans[1], tmp_path, 2, len(_STEPS), accumulate),
        strict=True,
    ):
        assert without == missing
        for name, own in alone.named_parameters():
            torch.testing.assert_close(found[name], own.detach(), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(again[name], own.detach(), rtol=1e-9, atol=1e-9)


def _plan(stages: list[list[str]]) -> galvatron.Plan:
    spec = galvatron.ModelSpec(**_facts())
    request = Request(model=spec, cluster=cluster_of(2), batch=8, schedule=ONE_F_ONE_B)
    return priced(request, stages, micro_batches=2)


def _facts() -> dict[str, Any]:
    """The model cannot be traced without values, so its layers are written down."""

    def layer(name: str, parameters: int) -> LayerSpec:
        return LayerSpec(
            name=name, parameters=parameters, forward_flops=1, split_activation_bytes=0, boundary_bytes=4,
            replicated_parameters=parameters,
        )  # fmt: skip

    layers = (layer("embedding", 80), *[layer("block", 216)] * 3, layer("head", 90))
    training = Training(precision=Precision.FP32)
    return {"name": "experts", "family": "generic", "layers": layers, "training": training}
