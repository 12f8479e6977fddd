"""Dropout is the same where activations are replicated and independent where they are divided.

What would break: tensor-parallel ranks that drop different elements of one activation compute different models; ranks
that share numbers where they should not drop the same elements of different samples, heads or tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from dropping import FAMILIES, RATE, disagreement, drawn_alike, equal, observed, shared_by_rows, with_dropout
from longer import longer
from oracle import Case, batches, first_weights, stock_loss, stock_model
from parity import plan_for
from ranks import ranks
from small_models import LAYERS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import galvatron
from galvatron.core.errors import InvalidInput


def _halves_equal(case: Case) -> list[dict[str, Tensor]]:
    """Batches whose second half repeats the first."""
    return [{name: torch.cat([rows[: len(rows) // 2]] * 2) for name, rows in batch.items()} for batch in batches(case)]


@pytest.mark.parametrize("family", [own if own in ("bert", "t5") else longer(own) for own in FAMILIES])
def test_tensor_parallel_ranks_agree_outside_the_split_parts_alone(family: str) -> None:
    """Every layer gives bit-equal activations on ranks that hold the same rows, though each drops its own heads."""
    found = observed(with_dropout(family, "dp2-tp2"))
    assert disagreement(found) is None
    assert drawn_alike(found) is None
    assert shared_by_rows(found) is None
    assert len({seen.losses[0] for seen in found}) == 1


def test_attention_alone_differs_between_tensor_parallel_ranks() -> None:
    first, peer, _, _ = observed(with_dropout("bert", "dp2-tp2"))
    same = [torch.equal(ours, theirs) for ours, theirs in zip(first.masks, peer.masks, strict=True)]
    assert same == [mask.ndim == 3 for mask in first.masks]


@pytest.mark.parametrize(
    ("strategy", "different"),
    [
        ("dp2-tp2", [0, 2]),
        ("tp2-sdp2", [0, 1]),
        longer("dp4", [0, 1, 2, 3]),
        ("sdp4", [0, 1, 2, 3]),
        longer("dp2-sdp2", [0, 1, 2, 3]),
    ],
)
def test_data_parallel_ranks_differ(strategy: str, different: list[int]) -> None:
    """On equal samples, so that only dropout can tell them apart."""
    case = with_dropout("bert", strategy)
    found = observed(case, _halves_equal(case))
    for a, b in combinations(different, 2):
        for ours, theirs in zip(found[a].masks, found[b].masks, strict=True):
            assert not torch.equal(ours, theirs), (a, b)


def test_tokens_divided_by_sequence_parallelism_draw_for_themselves() -> None:
    found = observed(replace(with_dropout("bert", ""), stages=[["tp4", "tp4+sp", "tp4+sp", "tp4+sp"]]))
    hidden = [[mask for mask in seen.masks if mask.ndim == 3 and mask.shape[1] == 2] for seen in found]
    assert [len(masks) for masks in hidden] == [4] * 4, "two dropouts of hidden states in each of two encoders"
    for a, b in combinations(range(4), 2):
        for ours, theirs in zip(hidden[a], hidden[b], strict=True):
            assert not torch.equal(ours, theirs)


def test_layers_micro_batches_and_iterations_draw_anew() -> None:
    """The same samples in both micro-batches and in both iterations."""
    case = with_dropout("bert", "dp2-tp2", micro_batches=2)
    (batch,) = _halves_equal(case)
    seen = observed(case, [batch, batch])[0]
    hidden = [mask for mask in seen.masks if mask.ndim == 3]
    assert len(hidden) == 2 * 2 * 5, "iterations, micro-batches, dropouts of hidden states"
    for a, b in combinations(hidden, 2):
        assert not torch.equal(a, b)
    assert seen.losses[0] != seen.losses[1]


@pytest.mark.parametrize(
    ("family", "strategy"),
    [longer("gpt2", "dp2-tp2"), ("gpt2", "tp4+sp"), longer("gpt2", "sdp4"), longer("t5", "tp2-sdp2")],
)
def test_recomputing_draws_the_same_again(family: str, strategy: str) -> None:
    """Gradients with recompute are bit-equal to those without."""
    embeddings = (0, 3) if family == "t5" else (0,)
    stage = [strategy.removesuffix("+sp") if n in embeddings else strategy for n in range(LAYERS[family])]
    plain = replace(with_dropout(family, strategy, micro_batches=2), stages=[stage])
    again = replace(plain, stages=[[f"{each}+rc" for each in stage]])
    for ours, theirs in zip(observed(again), observed(plain), strict=True):
        assert ours.losses == theirs.losses
        assert equal([own.gradient for own in ours.held], [own.gradient for own in theirs.held])


def test_a_seed_says_it_all() -> None:
    """Two runs of one seed are bit-equal, another seed is another run; the program's own generator is left alone."""
    case = with_dropout("bert", "sdp2-tp2", micro_batches=2)
    first, again, other = observed(case), observed(case), observed(case, seed=1)
    for ours, theirs, different in zip(first, again, other, strict=True):
        assert ours.losses == theirs.losses
        assert equal([own.gradient for own in ours.held], [own.gradient for own in theirs.held])
        assert ours.losses != different.losses
        assert ours.generator_untouched


@pytest.mark.parametrize(("strategy", "copies"), [("dp2-tp2", 2), longer("sdp4", 1), longer("tp4", 4)])
def test_the_share_that_is_dropped(strategy: str, copies: int) -> None:
    """Within five standard deviations of the rate, over all ranks and all dropouts; copies drop alike."""
    masks = [mask for seen in observed(with_dropout("bert", strategy)) for mask in seen.masks]
    kept, count = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    assert abs(kept / count - (1 - RATE)) < 5 * (RATE * (1 - RATE) * copies / count) ** 0.5


def _evaluate(case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]) -> tuple[list[float], bool]:
    """On a rank: the loss in evaluation, in training and in evaluation again."""
    model = galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu")
    before = torch.get_rng_state()
    losses = [float(model.evaluate(batch)), float(model.forward_backward(batch)), float(model.evaluate(batch))]
    return losses, torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("strategy", ["sdp2-tp2", longer("dp4")])
def test_evaluation_drops_nothing(strategy: str) -> None:
    case = with_dropout("bert", strategy)
    (batch,) = batches(case)
    expected = float(stock_loss(stock_model(case).eval(), batch).detach())
    for losses, untouched in ranks(4).run(_evaluate, case, plan_for(case), first_weights(case), batch):
        assert losses[::2] == pytest.approx([expected] * 2, rel=1e-5)
        assert losses[1] != pytest.approx(expected, rel=1e-5), "and training drops again afterwards"
        assert untouched


def _checkpointed(case: Case, plan: galvatron.Plan, batch: dict[str, Tensor]) -> str:
    """On a rank: a model that recomputes its blocks by itself."""
    model: Any = stock_model(case)
    for block in model.transformer.h:

        def forward(own: nn.Module, *given: Any, **more: Any) -> Any:
            return checkpoint(partial(type(own).forward, own, **more), *given, use_reentrant=False)

        block.forward = MethodType(forward, block)
    own = galvatron.parallelize(model, plan, dtype=case.dtype, device="cpu", check=False)
    try:
        own.forward_backward(batch)
    except InvalidInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("strategy", "refused"), [("tp2", True), ("tp2+rc", True), longer("dp2", False)])
def test_a_checkpoint_of_the_models_own_is_refused_where_ranks_would_draw_anew(strategy: str, refused: bool) -> None:
    """In its recompute TP ranks would count parts that forward did not have."""
    case = with_dropout("gpt2", strategy)
    said = ranks(2).run(_checkpointed, case, plan_for(case), batches(case)[0])[0]
    assert ("is recomputed in backward by a checkpoint of the model's own" in said) == refused
