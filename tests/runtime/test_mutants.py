"""Deliberate breaks of the runtime are noticed: each by the check that is there for it, which passes without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bf16_oracle import excess
from dropping import disagreement, drawn_alike, observe, shared_by_rows, with_dropout
from experts_oracle import case, compare
from keeping import watch
from longer import longer
from loops import accumulate, accumulated_difference, evaluating
from mutants import MUTANTS, under
from oracle import Case, batches, first_weights, single_process
from parity import difference, plan_for, train
from ranks import ranks
from small_models import config

_Check = Callable[[str | None], str | None]
"""Runs the model under a mutant and says what is wrong; None if nothing is."""


def _parity(family: str, *stages: list[str], clip: float | None = None, steps: int = 1) -> _Check:
    """Training compared with a single process."""
    case = Case(config=config(family), stages=list(stages), micro_batches=2, padding=True, steps=steps, clip=clip)

    def check(mutant: str | None) -> str | None:
        found = ranks(4).run(under, mutant, train, case, plan_for(case), first_weights(case), batches(case))
        return difference(case, found, single_process(case))

    return check


def _evaluation(mutant: str | None) -> str | None:
    case = Case(config=config("gpt2"), stages=[["sdp4", "dp2-sdp2", "sdp4", "dp4+zero2"]], micro_batches=2)
    found = ranks(4).run(under, mutant, evaluating, case, plan_for(case), first_weights(case), batches(case))
    return difference(case, found, single_process(case))


def _accumulation(mutant: str | None) -> str | None:
    case = Case(config=config("gpt2"), stages=[["tp4", "dp4", "dp2-tp2", "dp4"]], micro_batches=2)
    found = ranks(4).run(under, mutant, accumulate, case, plan_for(case), first_weights(case), batches(case))
    return accumulated_difference(case, found)


def _bf16(mutant: str | None) -> str | None:
    case = Case(config=config("bert"), stages=[["dp4", "sdp4", "dp2-tp2", "sdp4"]], dtype=torch.bfloat16)
    found = ranks(4).run(under, mutant, train, case, plan_for(case), first_weights(case), batches(case))
    return excess(case, found)


def _memory(mutant: str | None) -> str | None:
    """Sharded layers keep a shard of parameters and one of gradients; the head is whole before its backward."""
    wide = config("llama", vocab_size=64, hidden_size=64, intermediate_size=256)
    case = Case(config=wide, stages=[["sdp4+rc"] * 4], batch=8, micro_batches=2, dtype=torch.float32, steps=1)
    found = ranks(4).run(under, mutant, watch, case, plan_for(case), first_weights(case), batches(case))
    most = max(value for seen in found for values in seen.values() for value in values)
    return f"{most:.2f} of the model is alive" if most > 0.6 else None


def _dropout(mutant: str | None) -> str | None:
    """Tensor-parallel ranks agree outside the split parts and not inside, others nowhere."""
    case = with_dropout("bert", "dp2-tp2")
    found = ranks(4).run(under, mutant, observe, case, plan_for(case), first_weights(case), batches(case))
    return disagreement(found) or drawn_alike(found) or shared_by_rows(found)


def _experts(family: str, *stages: list[str], **options: Any) -> _Check:
    """Experts with axes of their own, compared with a single process."""
    return lambda mutant: compare(case(family, *stages, steps=1, **options), mutant)


def _recompute(mutant: str | None) -> str | None:
    case = with_dropout("bert", "dp2-tp2", micro_batches=2)
    again = replace(case, stages=[["dp2-tp2+rc"] * 4])
    plain, repeated = (
        ranks(4).run(under, mutant, observe, each, plan_for(each), first_weights(each), batches(each))
        for each in (case, again)
    )
    for rank, (ours, theirs) in enumerate(zip(repeated, plain, strict=True)):
        for own, other in zip(ours.held, theirs.held, strict=True):
            if not torch.equal(own.gradient, other.gradient):
                return f"rank {rank}: recompute changes the gradient of {own.name}"
    return None


_CHECKS: dict[str, _Check] = {
    "data": _parity("bert", ["dp4", "dp4", "dp2-tp2", "dp4"]),
    "sharded": _parity("bert", ["sdp4", "sdp2-tp2", "sdp4", "dp4+zero2"]),
    "hybrid": _parity("bert", ["dp2-sdp2", "sdp2-dp2", "dp2-sdp2", "dp4"]),
    "tensor": _parity("bert", ["tp4", "tp4", "dp2-tp2", "tp4"]),
    "sequence": _parity("bert", ["tp4", "tp4+sp", "tp4", "tp4+sp"]),
    "mixed": _parity("bert", ["tp2-dp2", "tp4", "dp4", "tp2-dp2"]),
    "pipeline": _parity("bert", ["dp2", "tp2"], ["dp2", "tp2"]),
    "norm": _parity("bert", ["sdp4", "dp4", "dp2-tp2", "tp4"], clip=0.5, steps=2),
    "resplit": _parity("gpt2", ["tp4", "dp4", "dp4", "dp2-tp2"]),
    "tied": _parity("gpt2", ["dp2", "tp2"], ["sdp2", "dp2"], clip=0.5),
    "experts": _experts("qwen3_moe", ["dp4", "dp4/dp2-ep2", "dp2-tp2/ep4", "dp4"]),
    "split experts": _experts("qwen3_moe", ["dp4", "dp2-tp2/ep2-tp2", "dp2-tp2/ep2-tp2", "dp4"]),
    "balanced experts": _experts(
        "mixtral",
        ["dp4", "sdp4/ep4", "dp2-tp2", "dp2-sdp2"],
        config={"output_router_logits": True, "router_aux_loss_coef": 0.5},
        padding=True,
    ),
    "biased experts": _experts("gpt_oss", ["dp4", "dp2-tp2", "dp2-tp2", "dp4"]),
    "few experts": _experts("gpt_oss", ["dp4", "dp4/dp2-ep2", "sdp4/sdp2-ep2", "dp4"], skewed=True),
    "evaluation": _evaluation,
    "accumulation": _accumulation,
    "bf16": _bf16,
    "memory": _memory,
    "dropout": _dropout,
    "recompute": _recompute,
}

_CAUGHT_BY = {
    "dp averages instead of summing": "data",
    "dp never sums": "data",
    "dp sums the last micro batch only": "data",
    "sdp averages instead of summing": "sharded",
    "sdp loses all but the last micro batch": "sharded",
    "hybrid sharding never sums over dp": "hybrid",
    "sharded weights stay gathered after an evaluation": "evaluation",
    "gradients of earlier calls are summed again": "accumulation",
    "f sums no gradients": "tensor",
    "g sums no outputs": "tensor",
    "the bias is added before the sum": "tensor",
    "sequence parallel norms keep partial gradients": "sequence",
    "gathered sequences sum their gradients": "sequence",
    "words are numbered from the wrong rank": "tensor",
    "targets are numbered from the wrong rank": "tensor",
    "slices have the rows of a neighbour": "mixed",
    "slice gather sums gradients of copies": "mixed",
    "inputs stay in order when rows change": "mixed",
    "inputs are those of a neighbours rows": "mixed",
    "stages receive rows in another order": "pipeline",
    "ignored targets are counted": "data",
    "the norm counts every copy": "norm",
    "the norm is that of the ranks own part": "norm",
    "the norm counts tied weights twice": "tied",
    "clipping scales nothing": "norm",
    "the loss counts every copy": "tensor",
    "copies of tied weights are not summed": "tied",
    "borrowed weights give no gradient": "mixed",
    "weights split anew keep one ranks gradient": "resplit",
    "a token is dropped on its way to its expert": "experts",
    "gradients of experts are averaged": "experts",
    "replicated experts average their gradients": "experts",
    "experts are summed over the ranks of the layer": "experts",
    "routers miss the tokens of one rank": "experts",
    "norms of heads keep partial gradients": "split experts",
    "packed projections are split as plain ones": "split experts",
    "biases of experts are added by each rank": "biased experts",
    "biases of experts keep partial gradients": "biased experts",
    "a rank without tokens has no gradients": "few experts",
    "each rank counts its own rows": "balanced experts",
    "the term is added for each micro batch": "balanced experts",
    "masters are kept in bf16": "bf16",
    "sharded layers stay gathered until backward": "memory",
    "attention drops alike on all tensor parallel ranks": "dropout",
    "ranks drop differently outside the split parts": "dropout",
    "all rows drop alike": "dropout",
    "recomputing draws anew": "recompute",
}


_LONG = {"split experts", "biased experts", "balanced experts", "few experts", "evaluation", "bf16", "recompute"}
"""Checks of several seconds, with their mutants for the longer run only: without a mutant ``make test`` has the same in
``test_experts``, ``test_balance``, ``test_training_loop``, ``test_bf16`` and ``test_dropout``."""
_SHOWN = {
    "data", "sharded", "hybrid", "tensor", "sequence", "mixed", "resplit", "tied", "experts", "memory", "accumulation",
}  # fmt: skip
"""Without a mutant the same is in ``test_family_plans``, ``test_tied_weights``, ``test_experts``, ``test_kept_memory``
and ``test_training_loop``."""
_SHORT = {check: mutant for mutant, check in reversed(_CAUGHT_BY.items()) if check not in _LONG}
"""The first mutant of each of the other checks."""


@pytest.mark.parametrize("check", [longer(own) if own in _LONG | _SHOWN else own for own in _CHECKS])
def test_without_a_mutant_nothing_is_wrong(check: str) -> None:
    assert _CHECKS[check](None) is None


def test_every_mutant_is_tried() -> None:
    assert _CAUGHT_BY.keys() == MUTANTS.keys()
    assert set(_CAUGHT_BY.values()) == _CHECKS.keys()


@pytest.mark.parametrize("mutant", [own if own in _SHORT.values() else longer(own) for own in _CAUGHT_BY])
def test_a_mutant_is_noticed(mutant: str) -> None:
    assert _CHECKS[_CAUGHT_BY[mutant]](mutant) is not None
