"""What cannot be divided is refused by name before it is computed wrongly; dropout draws for each slice by itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from context_cases import ContextCase
from dropping import Seen, observed, with_dropout
from longer import longer
from oracle import batches, first_weights
from parity import build, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor
from transformers import AutoConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.context import CONTEXT_ATTENTION, ContextMask, given_mask, sliced
from galvatron.families.registry import layered_model
from galvatron.runtime.checks import check_model
from galvatron.runtime.context.attention import context_attention


@pytest.mark.parametrize("family", ["t5", "vit", "swin"])
def test_families_that_cannot(family: str) -> None:
    layered = layered_model(build_meta(config(family), Training(dropout=False)))
    assert all(layered.why_undivided(index) for index in range(len(layered.layers)))


def test_a_plan_that_divides_heads_too_far() -> None:
    """Somebody's edited plan file: refused when the model is there, before any process sends a message."""
    case = ContextCase(config=config("llama"), stages=[["ulysses2"] * 4])
    plan = plan_for(case)
    (stage,) = plan.stages
    edited = replace(
        stage, devices=tuple(range(8)), layers=tuple(replace(own, strategy="ulysses8") for own in stage.layers)
    )
    layered = layered_model(build_meta(config("llama"), plan.model.training))
    check_model(plan, layered)
    with pytest.raises(InvalidInput, match=r"stages\[0\]\.layers\[1\].*'ulysses8' cannot divide.*heads") as caught:
        check_model(replace(plan, stages=(edited,)), layered)
    assert "keys and values" in str(caught.value)


def _lengths(case: ContextCase, plan: galvatron.Plan, folder: Any, batch: dict[str, Tensor]) -> list[str]:
    """On a rank: what is said of each length."""
    model = build(case, plan, folder)
    said = []
    for length in (23, 22, 18):
        try:
            model.forward_backward({name: own[:, :length] for name, own in batch.items()})
        except InvalidInput as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("strategy", "multiple"), [("ring2", 4), longer("ring2-ulysses2", 8), longer("ulysses4", 4)])
def test_lengths_that_do_not_divide(strategy: str, multiple: int) -> None:
    case = ContextCase(config=config("llama"), stages=[[strategy] * 4])
    (batch, *_) = batches(case)
    for said in ranks(case.devices).run(_lengths, case, plan_for(case), first_weights(case), batch):
        assert len(said) == 3
        assert all(f"pad them to a multiple of {multiple}" in own for own in said)


def _attend(mask: Any, **asked: Any) -> None:
    own = torch.randn(1, 2, 4, 4)
    module: Any = SimpleNamespace(is_causal=True)
    context_attention(module, own, own, own, mask, **asked)


@pytest.mark.parametrize(
    ("mask", "asked", "said"),
    [
        (None, {}, "a mask of its model's own"),
        (torch.ones(4, 4), {}, "a mask of its model's own"),
        (ContextMask("ring", ""), {"dropout": 0.1}, "which a ring cannot"),
        (ContextMask("ring", ""), {"sliding_window": 4}, "a sliding window"),
        (ContextMask("", "ulysses"), {"softcap": 30.0}, "a soft cap"),
        (ContextMask("", "ulysses"), {"s_aux": torch.zeros(2)}, "sinks"),
    ],
)
def test_attention_that_it_does_not_know(mask: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        _attend(mask, **asked)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, "attention_mask has 4 dims"),
        ({"inputs_embeds": torch.ones(2, 8, 4)}, "inputs_embeds given"),
        ({"labels": torch.ones(2, dtype=torch.long)}, "cannot be divided along the sequence"),
    ],
)
def test_batches_that_cannot_be_divided(more: dict[str, Tensor], said: str) -> None:
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), **more}
    with pytest.raises(InvalidInput, match=said):
        sliced(batch, torch.arange(4), ("", ""), shifts=False, separates=False)


def test_a_slice_of_a_batch() -> None:
    """Positions and targets are those of the whole sequence."""
    ids = torch.arange(16).view(2, 8)
    tokens = torch.tensor([0, 1, 6, 7])
    part, mask = sliced({"input_ids": ids, "labels": ids}, tokens, ("a", "b"), shifts=True, separates=True)
    assert part["input_ids"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert part["position_ids"].tolist() == [[0, 1, 6, 7]] * 2
    assert part["shift_labels"].tolist() == [[1, 2, 7, -100], [9, 10, 15, -100]]
    assert (mask.ring, mask.ulysses, mask.runs) == ("a", "b", None)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [*range(8)]])
    packed = {"input_ids": ids, "position_ids": positions}
    _, mask = sliced(packed, tokens, ("a", "b"), shifts=True, separates=True)
    assert mask.runs is not None
    assert mask.runs.tolist() == [[0, 0, 3, 0, 3], [0, 3, 5, 3, 5], [0, 5, 8, 5, 8], [1, 0, 8, 0, 8]]
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 8, [0, 0, 1, 1, 1, 0, 1, 0]])}
    _, mask = sliced(padded, tokens, ("a", "b"), shifts=True, separates=True)
    assert mask.runs is not None
    assert mask.runs.tolist() == [[0, 0, 8, 0, 8], [1, 0, 8, 2, 5], [1, 0, 8, 6, 7]]


def _block(*places: Tensor) -> Tensor:
    """Tokens 2 and 3 see each other."""
    _, _, query, key = places
    return (query >= 2) & (query < 4) & (key >= 2) & (key < 4)


@pytest.mark.parametrize(
    ("make", "asked", "known"),
    [
        (create_causal_mask, {}, True),
        (create_causal_mask, {"position_ids": torch.arange(8)[None] % 4}, True),
        (create_bidirectional_mask, {}, True),
        (create_causal_mask, {"or_mask_function": _block}, False),
        (create_causal_mask, {"and_mask_function": _block, "position_ids": torch.arange(8)[None] % 4}, False),
        (create_causal_mask, {"block_sequence_ids": torch.zeros(1, 8, dtype=torch.long)}, False),
        (create_sliding_window_causal_mask, {}, False),
        (create_chunked_causal_mask, {}, False),
    ],
)
def test_masks_that_a_model_asks_for(make: Any, asked: dict[str, Any], known: bool) -> None:
    """Of those that attention over divided sequences does not know it gets none, and refuses that."""
    own: Any = config("llama")
    chosen = AutoConfig.for_model(**{**own, "sliding_window": 4, "attention_chunk_size": 4})
    chosen._attn_implementation = CONTEXT_ATTENTION
    if make is not create_bidirectional_mask:
        asked = {"past_key_values": None, **asked}
    with given_mask(ContextMask("", "ulysses")):
        made = make(config=chosen, inputs_embeds=torch.zeros(1, 8, 4), attention_mask=None, **asked)
    assert (made == ContextMask("", "ulysses")) == known


def _hidden(found: list[Seen], length: int) -> list[list[Tensor]]:
    return [[mask for mask in own.masks if mask.ndim == 3 and mask.shape[1] == length] for own in found]


def test_slices_draw_for_themselves() -> None:
    """Dropout of hidden states differs from slice to slice."""
    case = replace(with_dropout("bert", "ulysses4"), stages=[["ulysses4"] * 4])
    found = observed(case)
    hidden = _hidden(found, 2)
    assert hidden[0]
    for ours, theirs in zip(hidden[0], hidden[1], strict=True):
        assert not torch.equal(ours, theirs)


@pytest.mark.slow
def test_recomputed_slices_draw_the_same_again() -> None:
    case = replace(with_dropout("bert", "ulysses4"), stages=[["ulysses4"] * 4])
    again = observed(replace(case, stages=[["ulysses4+rc"] * 4]))
    for ours, theirs in zip(again, observed(case), strict=True):
        assert ours.losses == theirs.losses
        assert all(torch.equal(a.gradient, b.gradient) for a, b in zip(ours.held, theirs.held, strict=True))
