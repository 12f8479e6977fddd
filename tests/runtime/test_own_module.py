"""A module of the user's own, with batches of any form, trains under a plan as it does in one process."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import cluster_of
from ranks import ranks
from torch import Tensor, nn
from torch.nn import functional

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B, Precision
from galvatron.families.generic.own_module import check_sum, own_module
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_EXAMPLE = Path(__file__).parents[2] / "examples" / "train_nanogpt.py"


def _nanogpt() -> Any:
    spec = importlib.util.spec_from_file_location("train_nanogpt", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_nanogpt"] = module
    spec.loader.exec_module(module)
    return module


class Regression(nn.Module):
    """Blocks on vectors: neither tokens nor logits nor labels."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.exit = nn.Linear(8, 2)

    def forward(self, points: Tensor, scale: Tensor) -> Tensor:
        x = self.entry(points * scale)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.exit(x)
        return made


def _points(rows: int, seed: int) -> dict[str, Any]:
    """A batch with other names than the module has, in a form of its own."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.randn(rows, 3, generator=generator)
    return {"where": where, "measured": {"value": where[:, :2].sin(), "weight": torch.rand(rows, generator=generator)}}


def _inputs(batch: Any) -> Any:
    return {"points": batch["where"], "scale": 1 + batch["measured"]["weight"][:, None]}


def _loss(output: Tensor, batch: Any) -> Tensor:
    each = functional.mse_loss(output, batch["measured"]["value"], reduction="none").sum(-1)
    total: Tensor = (each * batch["measured"]["weight"]).sum()
    return total


def _mean_loss(output: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch["measured"]["value"])


def _plan(spec: galvatron.ModelSpec, stages: list[list[str]], batch: int) -> galvatron.Plan:
    request = Request(model=spec, cluster=cluster_of(2), batch=batch, schedule=ONE_F_ONE_B)
    return priced(request, stages, micro_batches=2)


# On a rank


def _train_nanogpt(plan: galvatron.Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank builds the module with a seed of its own."""
    example = _nanogpt()
    torch.manual_seed(torch.distributed.get_rank())
    config = example.GPTConfig(n_layer=2)
    model = galvatron.parallelize(
        example.GPT(config), plan, example=example.batch_of(0, 2, config), device="cpu", dtype="fp64"
    )
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        idx, targets = (own.clone() for own in example.batch_of(step, plan.batch, config))
        targets[0, : 5 * step] = -1  # which the module's own loss leaves out
        losses.append(float(model.forward_backward((idx, targets))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.whole_parameters())


def _train_regression(plan: galvatron.Plan) -> list[float]:
    torch.manual_seed(5)
    model = galvatron.parallelize(
        Regression(), plan, example=_points(4, 0), inputs=_inputs, loss=_loss, device="cpu", dtype=torch.float64
    )
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        losses.append(float(model.forward_backward(_points(plan.batch, step))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


# In the parent


@pytest.mark.parametrize("stages", [[["dp2", "sdp2", "dp2+rc", "sdp2"]], [["single"] * 2, ["single"] * 2]])
def test_a_nanogpt_trains_as_in_one_process(stages: list[list[str]]) -> None:
    example = _nanogpt()
    torch.manual_seed(0)  # rank 0's
    config = example.GPTConfig(n_layer=2)
    stock = example.GPT(config)
    spec = galvatron.describe(stock, example.batch_of(0, 2, config))
    plan = _plan(spec, stages, batch=8)
    (losses, weights), *_ = ranks(2).run(_train_nanogpt, plan)
    own = copy.deepcopy(stock).double()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        idx, targets = (own.clone() for own in example.batch_of(step, plan.batch, config))
        targets[0, : 5 * step] = -1
        loss = own(idx, targets)[1]
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)  # the loss itself is computed in fp32 at least
    for name, value in own.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-7)


class _Centred(nn.Module):
    """A block that subtracts a running mean, as some normalisers and codebooks do, or one that counts its steps."""

    mean: Tensor

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._counts = counts
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(torch.ones(8) if self._counts else hidden.detach().mean(0).to(self.mean), 0.1)
        made: Tensor = self.linear(hidden - self.mean)
        return made


def _centred(*, counts: bool = False) -> Regression:
    torch.manual_seed(5)
    model = Regression()
    model.blocks = nn.ModuleList([_Centred(counts=counts), _Centred(counts=counts)])
    return model


def _train_centred(plan: galvatron.Plan, check: bool, counts: bool) -> str:
    options: Any = {"example": _points(4, 0), "inputs": _inputs, "loss": _loss, "device": "cpu"}
    try:
        model = galvatron.parallelize(_centred(counts=counts), plan, check=None if check else False, **options)
        model.forward_backward(_points(plan.batch, 0))
    except InvalidInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stages", [[["dp2"] * 4], [["single"] * 2, ["single"] * 2]])
def test_buffers_that_follow_the_data_are_refused(stages: list[list[str]]) -> None:
    """Each rank would follow its own rows; by the comparison before training, and without it after the first batch."""
    spec = galvatron.describe(_centred(), _points(4, 0), inputs=_inputs, loss=_loss)
    for check in (True, False):
        for said in ranks(2).run(_train_centred, _plan(spec, stages, batch=8), check, False):
            assert said.startswith("Regression: forward changes its buffer blocks.0.mean, as BatchNorm does")


@pytest.mark.parametrize(("micro_batches", "strategy"), [(1, "dp2"), (2, "dp2"), (1, "dp2+rc")])
def test_buffers_that_change_as_in_one_process_may(micro_batches: int, strategy: str) -> None:
    """Whatever the rows, and once in an iteration."""
    spec = galvatron.describe(_centred(counts=True), _points(4, 0), inputs=_inputs, loss=_loss)
    request = Request(model=spec, cluster=cluster_of(2), batch=8, schedule=ONE_F_ONE_B)
    plan = priced(request, [[strategy] * 4], micro_batches=micro_batches)
    for said in ranks(2).run(_train_centred, plan, False, True):
        assert bool(said) == (micro_batches > 1 or strategy != "dp2")


def test_batches_of_any_form_with_functions_of_the_user() -> None:
    torch.manual_seed(5)
    own = Regression()
    spec = galvatron.describe(own, _points(4, 0), inputs=_inputs, loss=_loss)
    plan = _plan(spec, [["dp2", "sdp2", "dp2", "sdp2"]], batch=8)
    losses = ranks(2).run(_train_regression, plan)[0]
    own = own.double()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for step, found in enumerate(losses):
        batch = _points(plan.batch, step)
        wide = {
            "where": batch["where"].double(),
            "measured": {key: value.double() for key, value in batch["measured"].items()},
        }
        loss = _loss(own(**_inputs(wide)), wide) / plan.batch
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)


def test_what_cannot_be_meant_is_said_in_the_users_words() -> None:
    model = Regression()
    found = own_module(model, _points(4, 0), _mean_loss, _inputs)
    assert found is not None
    with pytest.raises(InvalidInput, match=r"loss: of two samples .* it is a mean; return the sum"):
        check_sum(found)
    with pytest.raises(InvalidInput, match=r"Regression.forward takes \(points, scale\); give inputs="):
        own_module(model, _points(4, 0), _loss)
    with pytest.raises(InvalidInput, match="which tensor of the batch holds the labels is not known"):
        own_module(model, (torch.zeros(2, 3), torch.zeros(2, 1)))
    with pytest.raises(InvalidInput, match="has a str in it"):
        own_module(model, {"points": torch.zeros(2, 3), "scale": "large"}, _loss)
    with pytest.raises(InvalidInput, match="precision: 'fp8' given; expected one of fp32, tf32, bf16"):
        galvatron.describe(model, _points(4, 0), "fp8", inputs=_inputs, loss=_loss)
    found = own_module(model, _points(4, 0), _loss, _inputs)
    assert found is not None
    with pytest.raises(InvalidInput, match=r"has the form .* expected that of the example"):
        found.named({"where": torch.zeros(2, 3)})


def test_sizes_do_not_need_weights() -> None:
    example = _nanogpt()
    config = example.GPTConfig()
    batch = example.batch_of(0, 2, config)
    spec = galvatron.describe(example.GPT(config), batch)
    with torch.device("meta"):
        empty = example.GPT(config)
    assert galvatron.describe(empty, batch) == spec
    assert galvatron.describe(example.GPT(config), batch, "bf16").training.precision is Precision.BF16
    blocks = [layer for layer in spec.layers if layer.name == "block"]
    assert len(blocks) == config.n_layer
    assert blocks[0].parameters == sum(own.numel() for own in example.Block(config).parameters())
