"""Dropout is the same where activations are replicated and independent where they are divided.

What would break: tensor-parallel ranks that drop different elements of one activation compute different models; ranks
that share numbers where they should not drop the same elements of different samples, heads or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Case, batches, first_weights, stock_loss, stock_model
from parity import Held, held, plan_for
from ranks import ranks
from small_models import LAYERS, config
from torch import Tensor
from torch.nn import functional

import galvatron
from galvatron.spec import Attention, Training

_RATE = 0.25
_DROPOUTS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": _RATE, "attention_probs_dropout_prob": _RATE},
    "gpt2": {"resid_pdrop": _RATE, "attn_pdrop": _RATE, "embd_pdrop": _RATE},
    "llama": {"attention_dropout": _RATE},
    "swin": {"hidden_dropout_prob": _RATE, "attention_probs_dropout_prob": _RATE, "drop_path_rate": _RATE},
    "t5": {"dropout_rate": _RATE},
    "vit": {"hidden_dropout_prob": _RATE, "attention_probs_dropout_prob": _RATE},
}


def _case(family: str, strategy: str, **changes: Any) -> Case:
    return Case(
        config=config(family, **_DROPOUTS[family]),
        stages=[[strategy] * LAYERS[family]],
        training=Training(attention=Attention.EAGER),
        dtype=torch.float32,
        steps=1,
        **changes,
    )


@dataclass
class _Seen:
    """What one rank saw of an iteration."""

    losses: list[float]
    outputs: list[list[Tensor]]
    """For each layer, what it gave in each micro-batch."""
    masks: list[Tensor]
    """Of each dropout, in the order of the forward passes: which elements were kept."""
    held: list[Held]
    generator_untouched: bool


def _observe(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]], seed: int = 0) -> _Seen:
    """Run the batches one after the other and watch."""
    model = galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu", seed=seed)
    outputs: list[list[Tensor]] = [[] for _ in case.stages[0]]
    for number, slot in enumerate(model._pipeline.stage.slots):
        slot.register_forward_hook(lambda _, __, given, number=number: outputs[number].append(given[-1].detach()))
    masks: list[Tensor] = []
    stock = functional.dropout

    def watched(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        dropped = stock(tensor, p, training, inplace)
        if training and p > 0:
            masks.append(stock(torch.ones(0), p, training) if tensor is None else (dropped != 0) | (tensor == 0))
        return dropped

    before = torch.get_rng_state()
    functional.dropout = watched
    try:
        losses = [float(model.forward_backward(batch)) for batch in given]
    finally:
        functional.dropout = stock
    return _Seen(losses, outputs, masks, held(model), bool(torch.equal(before, torch.get_rng_state())))


def _observed(case: Case, given: list[dict[str, Tensor]] | None = None, seed: int = 0) -> list[_Seen]:
    found: list[_Seen] = ranks(case.devices).run(
        _observe, case, plan_for(case), first_weights(case), given or batches(case), seed
    )
    return found


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _halves_equal(case: Case) -> list[dict[str, Tensor]]:
    """A batch whose second half repeats the first."""
    return [{name: torch.cat([rows[: len(rows) // 2]] * 2) for name, rows in batch.items()} for batch in batches(case)]


@pytest.mark.parametrize("family", _DROPOUTS)
def test_tensor_parallel_ranks_agree_outside_the_split_parts(family: str) -> None:
    """Every layer gives bit-equal activations on ranks that hold the same rows, and others on those that do not."""
    first, peer, other, _ = _observed(_case(family, "dp2-tp2"))
    assert first.losses == peer.losses
    for number, (ours, theirs) in enumerate(zip(first.outputs, peer.outputs, strict=True)):
        assert _equal(ours, theirs), f"layer {number}"
    assert not _equal(first.outputs[-2], other.outputs[-2])


@pytest.mark.parametrize("family", _DROPOUTS)
def test_attention_drops_different_elements_on_each_tensor_parallel_rank(family: str) -> None:
    """Its maps have the heads of one rank; those of hidden states are drawn alike."""
    first, peer, _, _ = _observed(_case(family, "dp2-tp2"))
    attention = [place for place, mask in enumerate(first.masks) if mask.ndim == 4 and mask.shape[2] == mask.shape[3]]
    assert attention
    for place in attention:
        assert not torch.equal(first.masks[place], peer.masks[place])


def test_attention_alone_differs_between_tensor_parallel_ranks() -> None:
    first, peer, _, _ = _observed(_case("bert", "dp2-tp2"))
    same = [torch.equal(ours, theirs) for ours, theirs in zip(first.masks, peer.masks, strict=True)]
    assert same == [mask.ndim == 3 for mask in first.masks]


@pytest.mark.parametrize("strategy", ["dp2-tp2", "sdp2-tp2", "tp2-dp2", "dp4", "sdp4", "dp2-sdp2"])
def test_data_parallel_ranks_differ(strategy: str) -> None:
    """On equal samples, so that only dropout can tell them apart; equal rows are those of the batch's two halves."""
    case = _case("bert", strategy)
    found = _observed(case, _halves_equal(case))
    width = 2 if "tp" in strategy else 4
    groups = {"dp2-tp2": [0, 2], "sdp2-tp2": [0, 2], "tp2-dp2": [0, 1]}.get(strategy, [0, 1, 2, 3])
    assert len(groups) == width
    for a, b in combinations(groups, 2):
        for ours, theirs in zip(found[a].masks, found[b].masks, strict=True):
            assert not torch.equal(ours, theirs), (strategy, a, b)


def test_tokens_divided_by_sequence_parallelism_draw_for_themselves() -> None:
    case = replace(_case("bert", "tp2-dp2+sp"), stages=[["tp4", "tp4+sp", "tp4+sp", "tp4+sp"]])
    found = _observed(case)
    hidden = [[mask for mask in one.masks if mask.ndim == 3 and mask.shape[1] == 2] for one in found]
    assert [len(masks) for masks in hidden] == [4] * 4, "two dropouts of hidden states in each of two encoders"
    for a, b in combinations(range(4), 2):
        for ours, theirs in zip(hidden[a], hidden[b], strict=True):
            assert not torch.equal(ours, theirs)


def test_layers_micro_batches_and_iterations_draw_anew() -> None:
    """The same samples in both micro-batches and in both iterations."""
    case = _case("bert", "dp2-tp2", micro_batches=2)
    (batch,) = _halves_equal(case)
    seen = _observed(case, [batch, batch])[0]
    hidden = [mask for mask in seen.masks if mask.ndim == 3]
    assert len(hidden) == 2 * 2 * 5, "iterations, micro-batches, dropouts of hidden states"
    for a, b in combinations(hidden, 2):
        assert not torch.equal(a, b)
    assert seen.losses[0] != seen.losses[1]


@pytest.mark.parametrize("strategy", ["dp2-tp2", "tp4+sp", "sdp4", "tp2-sdp2"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_recomputing_draws_the_same_again(family: str, strategy: str) -> None:
    """Gradients with recompute are bit-equal to those without."""
    plain = _case(family, strategy, micro_batches=2)
    if strategy == "tp4+sp":
        embeddings = (0, 3) if family == "t5" else (0,)
        stage = ["tp4" if place in embeddings else "tp4+sp" for place in range(LAYERS[family])]
        plain = replace(plain, stages=[stage])
    again = replace(plain, stages=[[f"{each}+rc" for each in plain.stages[0]]])
    for ours, theirs in zip(_observed(again), _observed(plain), strict=True):
        assert ours.losses == theirs.losses
        assert _equal([own.gradient for own in ours.held], [own.gradient for own in theirs.held])


def test_a_seed_says_it_all() -> None:
    """Two runs of one seed are bit-equal, another seed is another run, and the program's own generator is left alone."""
    case = _case("bert", "sdp2-tp2", micro_batches=2)
    first, again, other = _observed(case), _observed(case), _observed(case, seed=1)
    for ours, theirs, different in zip(first, again, other, strict=True):
        assert ours.losses == theirs.losses
        assert _equal([own.gradient for own in ours.held], [own.gradient for own in theirs.held])
        assert ours.losses != different.losses
        assert ours.generator_untouched


@pytest.mark.parametrize("strategy", ["dp2-tp2", "sdp4", "tp4"])
def test_the_share_that_is_dropped(strategy: str) -> None:
    """Within five standard deviations of the rate, over all ranks and all dropouts."""
    masks = [mask for one in _observed(_case("bert", strategy)) for mask in one.masks]
    kept, count = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    distinct = count / (4 if strategy == "tp4" else 2 if strategy == "dp2-tp2" else 1)  # replicas drop alike
    assert abs(kept / count - (1 - _RATE)) < 5 * (_RATE * (1 - _RATE) / distinct) ** 0.5


def _evaluated(case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]) -> tuple[float, float]:
    model = galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu")
    return float(model.evaluate(batch)), float(model.forward_backward(batch))


def test_evaluation_drops_nothing() -> None:
    case = _case("bert", "sdp2-tp2")
    (batch,) = batches(case)
    expected = float(stock_loss(stock_model(case).eval(), batch).detach())
    for evaluated, trained in ranks(4).run(_evaluated, case, plan_for(case), first_weights(case), batch):
        assert evaluated == pytest.approx(expected, rel=1e-5)
        assert trained != pytest.approx(expected, rel=1e-5), "and training drops again afterwards"
