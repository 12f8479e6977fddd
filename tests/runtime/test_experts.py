"""Experts with axes of their own: training equals the stock model in one process, whoever holds which experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts_oracle import ExpertCase, built, case, compare, expert_plan, stock
from longer import longer
from oracle import batches
from ranks import ranks
from torch import Tensor
from torch._inductor import cpu_vec_isa
from torch.distributed import ProcessGroup

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Strategy, Training
from galvatron.families.build import without_weights
from galvatron.families.registry import layered_model
from galvatron.runtime.checks import check_model
from galvatron.runtime.compiled import compiler, why_not
from galvatron.runtime.experts.exchange import Routing, exchange, gather_tokens, slice_tokens
from galvatron.runtime.verify import difference as verified

_FP32 = {"dtype": torch.float32}
_SKEWED = {"skewed": True}
_CLIPPED = {"clip": 0.5}
_LONG = {"tokens": 16, "config": {"num_key_value_heads": 4}}


@pytest.mark.parametrize(
    ("family", "stages", "options"),
    [
        # Four ranks with an expert each; two replicas of two halves, replicated and sharded.
        ("mixtral", [["dp4", "dp4/ep4", "dp4/dp2-ep2", "dp4"]], _CLIPPED),
        longer("mixtral", [["sdp4", "sdp4/ep4+rc", "sdp4/sdp2-ep2", "sdp4"]], _FP32),
        longer("mixtral", [["dp4", "dp4/sdp2-ep2+rc", "dp4/ep2-sdp2+rc", "dp4"]], {}),
        longer("mixtral", [["dp4", "dp4", "dp4/ep4", "dp4"]], {}),
        # Beside TP: tokens divided among TP ranks, experts split by TP, or both kinds of layers next to each other.
        ("qwen3_moe", [["dp2-tp2", "dp2-tp2/ep4", "dp2-tp2/ep2-tp2", "tp4"]], _CLIPPED),
        longer("qwen3_moe", [["tp2-dp2", "tp2-dp2/ep2-dp2+rc", "tp2-dp2/tp2-ep2", "dp4"]], {}),
        longer("qwen3_moe", [["dp4", "sdp2-tp2/sdp2-ep2", "dp2-tp2/ep2-sdp2+rc", "dp4"]], _FP32),
        longer("qwen3_moe", [["dp4", "dp2-tp2", "sdp2-tp2/ep2-tp2", "dp4"]], {"micro_batches": 4, "batch": 16}),
        # In a pipeline.
        ("qwen3_moe", [["dp2", "dp2/ep2"], ["tp2/ep2", "sdp2"]], {"micro_batches": 4, **_CLIPPED}),
        longer("qwen3_moe", [["sdp2", "sdp2/ep2+rc"], ["dp2/ep2", "dp2"]], {"schedule": "gpipe", **_FP32}),
        # ZeRO-2 and hybrid sharding of the rest of a layer.
        longer("qwen3_moe", [["dp4", "dp4/dp2-ep2+zero2", "dp2-sdp2/ep4+rc", "dp4"]], {}),
        longer("qwen2_moe", [["dp4", "sdp4/sdp2-ep2", "dp2-tp2/ep2-sdp2+rc", "dp4"]], {}),
        # A dense block, shared experts, groups of experts.
        ("deepseek_v3", [["dp4", "dp2-tp2", "dp2-tp2/ep4+rc", "sdp4"]], _CLIPPED),
        longer("deepseek_v3", [["sdp4", "sdp4", "sdp4/sdp2-ep2+rc", "dp4"]], _SKEWED),
        longer("deepseek_v3", [["dp2", "tp2"], ["tp2/ep2", "dp2"]], _FP32),
        # Biases; tokens for two of the four experts only, so that some ranks get none.
        ("gpt_oss", [["dp4", "dp4/ep4", "sdp4/sdp2-ep2+rc", "dp4"]], _SKEWED),
        longer("gpt_oss", [["dp4", "dp2-tp2/ep4", "dp4/dp2-ep2", "dp4"]], {**_SKEWED, **_FP32}),
        longer("gpt_oss", [["dp4", "dp2-tp2/ep2-dp2", "tp2-dp2/ep4", "dp4"]], {}),
        # Their biases added by two ranks, once.
        ("gpt_oss", [["dp2-tp2", "dp2-tp2", "sdp2-tp2+rc", "tp4"]], _CLIPPED),
        longer("gpt_oss", [["dp4", "tp2-dp2", "dp2-tp2/ep4", "dp4"]], _SKEWED),
        longer("gpt_oss", [["dp2", "tp2"], ["sdp2", "tp2"]], {"micro_batches": 4, **_FP32}),
        # Sequences divided, so that tokens come to their experts from all parts of a sample.
        ("qwen3_moe", [["ring4+zero3", "ring2-ulysses2/sdp2-ep2+zero3", "ulysses2-tp2/ep4", "dp4"]], _LONG),
        longer("mixtral", [["dp4", "dp2-ulysses2/ep4", "ring4/dp2-ep2+rc", "dp4"]], _LONG | _CLIPPED),
        longer("qwen3_moe", [["dp4", "ulysses2-tp2/ep2-tp2", "ring2-tp2/ep4", "tp4"]], _LONG),
        longer("qwen3_moe", [["dp2", "ring2/ep2"], ["ulysses2/ep2+rc", "dp2"]], {"micro_batches": 4} | _LONG),
        longer("qwen2_moe", [["sdp4", "sdp2-ring2/ep4+rc", "dp2-ring2/ep2-sdp2", "dp4"]], _LONG | _FP32),
        longer("deepseek_v3", [["dp4", "dp2-ring2", "ring4/ep4", "ulysses4"]], _LONG),
    ],
)
def test_equals_one_process(family: str, stages: list[list[str]], options: dict[str, Any]) -> None:
    assert compare(case(family, *stages, **options)) is None


def _gradients(given: ExpertCase, plan: galvatron.Plan, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model = built(given, plan)
    model.forward_backward(batch)
    return {name: own.clone() for name, own in model.whole_gradients()}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bf16_is_as_exact_as_under_dp(family: str) -> None:
    """Gradients differ from those in fp32 by no more than without EP."""
    found = []
    for strategies, dtype in (
        (["dp4"] * 4, torch.float32),
        (["dp4"] * 4, torch.bfloat16),
        (["sdp4", "dp4/dp2-ep2", "sdp4/sdp2-ep2+rc", "dp4"], torch.bfloat16),
    ):
        given = case(family, strategies, dtype=dtype)
        found.append(ranks(4).run(_gradients, given, expert_plan(given), batches(given)[0])[0])
    exact, plain, ours = found
    for name, own in exact.items():
        assert (ours[name] - own).norm() <= 1.2 * (plain[name] - own).norm() + 1e-6 * own.norm(), name


# How tokens travel


def _travel() -> dict[str, Any]:
    """Tokens whose number is their value, to experts and back, in fp64 with gradients."""
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    rank = group.rank()
    # Rank 3 has no token, and nobody chooses the experts of rank 2 (4 and 5).
    index = torch.tensor([[0, 7], [3, 1], [6, 0], [1, 3]])[: 4 if rank < 3 else 0]
    tokens = (10.0 * rank + torch.arange(len(index), dtype=torch.float64))[:, None].requires_grad_()
    routing = Routing.of(index, 8, group)
    copies = exchange(tokens[routing.order // 2], routing.sent, routing.received, group)
    back = exchange(copies * (1 + routing.experts[:, None]), routing.received, routing.sent, group)
    back.sum().backward()  # type: ignore[no-untyped-call]
    return {
        "experts": routing.experts,
        "copies": copies.detach().flatten(),
        "order": routing.order,
        "back": back.detach().flatten(),
        "gradient": tokens.grad,
    }


def test_each_copy_arrives_at_its_expert_and_comes_back() -> None:
    found = ranks(4).run(_travel)
    chosen = torch.tensor([[0, 7], [3, 1], [6, 0], [1, 3]])
    for rank, own in enumerate(found):
        expected = [
            (expert % 2, 10.0 * source + token)
            for source in range(3)
            for expert in (2 * rank, 2 * rank + 1)
            for token, place in (chosen == expert).nonzero().tolist()
        ]
        assert list(zip(own["experts"].tolist(), own["copies"].tolist(), strict=True)) == expected
        sent = chosen[: len(own["gradient"])].flatten()
        tokens = 10.0 * rank + torch.arange(len(own["gradient"]), dtype=torch.float64).repeat_interleave(2)
        assert torch.equal(own["back"], (tokens * (1 + sent % 2))[own["order"]])
        assert torch.equal(own["gradient"], (1.0 + sent % 2).view(-1, 2).sum(1, keepdim=True).double())
    assert not len(found[2]["copies"])
    assert not len(found[3]["gradient"])


def _slices(count: int) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    tokens = torch.arange(2.0 * count, dtype=torch.float64).view(count, 2).requires_grad_()
    part = slice_tokens(tokens, group)
    whole = gather_tokens(part * part, count, group)
    whole.sum().backward()  # type: ignore[no-untyped-call]
    assert tokens.grad is not None
    return whole.detach(), tokens.grad


@pytest.mark.parametrize("count", [8, 7, 5, 2, 1])
def test_shared_tokens_are_divided_and_whole_again(count: int) -> None:
    """Also where they do not divide, or some ranks get none."""
    tokens = torch.arange(2.0 * count, dtype=torch.float64).view(count, 2)
    for whole, gradient in ranks(4).run(_slices, count):
        assert torch.equal(whole, tokens**2)
        assert torch.equal(gradient, 2 * tokens)


# What is refused, and what checks itself


@pytest.mark.parametrize(
    ("family", "strategy", "reason"),
    [
        ("mixtral", "dp3/ep3", r"layers\[1\].*'dp3/ep3' has axes for experts that divide them 3 ways, .* number 4"),
        ("gpt_oss", "tp2/tp2-ep1", "each kind may appear once, with a degree of at least 2"),
        (
            "gpt_oss",
            "dp2-tp2/ep2-tp2",
            "block.mlp.experts has a bias that tp cannot split; leave tp out of the experts' axes",
        ),
        ("deepseek_v3", "dp4/ep4", "has axes for experts, but this layer has none; leave out what follows the slash"),
        ("mixtral", "dp4/ep2", "axes of the experts are for 2 devices, those of the layer for 4"),
        ("mixtral", "dp2-tp2/tp2-ep2", "joins devices that tp of the layer does not"),
        ("mixtral", "ep4", "ep is for the experts of a layer"),
    ],
)
def test_axes_that_do_not_fit_are_refused(family: str, strategy: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        _check(family, strategy)


def _check(family: str, strategy: str) -> None:
    devices = Strategy.parse(strategy).devices
    given = case(family, [f"dp{devices}", strategy, *[f"dp{devices}"] * 2])
    check_model(expert_plan(given), layered_model(without_weights(stock(given))))


def _verify(given: ExpertCase, plan: galvatron.Plan) -> str | None:
    return verified(stock(given), plan, device=torch.device("cpu"))


def test_a_tiny_copy_is_compared_before_training() -> None:
    """Its experts shrink to a number that the plan's degree divides."""
    given = case("qwen3_moe", ["dp4", "dp2-tp2/ep4", "sdp4/sdp2-ep2", "dp4"], **_FP32)
    assert ranks(4).run(_verify, given, expert_plan(given)) == [None] * 4


def _compiled(given: ExpertCase, plan: galvatron.Plan, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]  # or four programs are compiled to find out
    return _gradients(given, plan, batch), compiler().failures


@pytest.mark.slow
@pytest.mark.skipif(why_not("cpu") is not None, reason=str(why_not("cpu")))
@pytest.mark.parametrize("strategy", ["dp2", "tp2", "tp2+rc"])
def test_shares_of_biases_are_compiled(strategy: str) -> None:
    """As exact as without a compiler, in bf16: transformers' grouped products are compiled in no other type."""
    found = []
    for dtype, compile in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        training = Training(dropout=False, attention=Attention.EAGER, compile=compile)
        given = case("gpt_oss", ["dp2", strategy, strategy, "dp2"], dtype=dtype, training=training)
        found.append(ranks(2).run(_compiled, given, expert_plan(given), batches(given)[0])[0])
    (exact, _), (plain, _), (ours, failures) = found
    assert failures == []
    for name, own in exact.items():
        assert (ours[name] - own).norm() <= 1.2 * (plain[name] - own).norm() + 0.02 * own.norm(), name
