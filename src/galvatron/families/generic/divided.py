"""Whether sequences of a model of no known family can be divided over ranks (CP), found by running it.

The model must take positions, and count them from the first token if it is given none; each block must have one
attention, called as transformers calls all of them, with nothing that attention over divided sequences does not know.
What a trial cannot see (a convolution along the sequence) is found when a plan is compared with one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from galvatron.families.build import without_weights
from galvatron.families.context import CONTEXT_ATTENTION, plain_mask, rotation_by_length, unknown_to_context
from galvatron.families.generic.decoder_inputs import seen
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import Call, on_meta, to_meta
from galvatron.families.layer import Batch

__all__ = ["TRIAL", "SeenAttention", "attending", "block_attention", "masked_otherwise", "why_undivided"]

TRIAL = "galvatron_trial"
"""Name of the attention that notes what it is called with, and of masks that note what they are made of."""


@dataclass(frozen=True, slots=True)
class SeenAttention:
    """The attention of a block, as a trial sees it."""

    heads: int
    key_value_heads: int
    width: int
    """Of a head."""
    causal: bool
    problem: str = ""
    """What it asks for that attention over divided sequences does not know."""


@dataclass(frozen=True, slots=True)
class _TrialMask:
    """In the place of a mask that transformers' helpers make."""

    plain: bool
    """Each token sees all, or itself and all before it: no window, no chunks, no documents."""
    shape: ClassVar = (1, 1, 1, 1)
    """As of a mask that is made: helpers look at it where one model hands its mask to another."""
    ndim: ClassVar = 4


def masked_otherwise(call: Call) -> bool:
    """Whether a block called in a trial has a mask that hides more than the tokens behind each one."""
    return any(isinstance(own, _TrialMask) and not own.plain for own in tree_leaves((call.args, call.kwargs)))


def why_undivided(model: Any, anatomy: Anatomy, trial: Batch) -> str | None:
    """Why sequences of the model, whatever its blocks, cannot be divided; None: they can."""
    name = type(model).__name__
    ids, labels = trial.get("input_ids"), trial.get("labels")
    if not type(model).__module__.startswith("transformers.") or ids is None:
        return f"{name} is no Hugging Face model of tokens"
    segment = anatomy.segments[0]
    if len(anatomy.segments) > 1 or segment.entries or segment.handed:
        return f"{name} has more than one list of blocks, or what one token attends to is not all tokens of its row"
    if labels is None or labels.shape != ids.shape:
        return f"{name} has no label for each token"
    if not {"position_ids", "attention_mask"} <= anatomy.inputs:
        return f"{name} takes no position_ids, so a part of a sequence would be at its start"
    rotation = rotation_by_length(model)
    if rotation is not None:
        return rotation
    padding = torch.ones_like(ids)
    padding[0, : ids.shape[1] // 2] = 0
    token = getattr(model.config, "pad_token_id", None)
    padded = ids if token is None else torch.where(padding.bool(), ids, token)
    inputs = anatomy.pick({**trial, "input_ids": padded, "attention_mask": padding})
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    if not _alike(seen(model, anatomy, inputs), seen(model, anatomy, {**inputs, "position_ids": places})):
        return f"{name} does not count positions from the first token of a row"
    return None


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two runs gave modules the same; what is the same for all rows may be there once. What has no values is
    not known to be."""
    if len(some) != len(others) or any(own.is_meta for own in (*some, *others)):
        return False
    return all(
        own.shape[1:] == other.shape[1:] and bool((own == other).all()) for own, other in zip(some, others, strict=True)
    )


def block_attention(model: nn.Module, anatomy: Anatomy, call: Call) -> SeenAttention | str:
    """The attention of a block, or why none is seen; ``call``: how it is called in a trial (:data:`TRIAL`)."""
    name = type(model.get_submodule(anatomy.name(call.block))).__name__
    block = without_weights(model.get_submodule(anatomy.name(call.block))).to("meta").eval()
    for module in block.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "grouped_mm"  # a loop over experts needs to know who chose which
    notes: list[SeenAttention] = []
    token = _NOTES.set(notes)
    args, kwargs = to_meta((call.args, call.kwargs))
    try:
        with torch.no_grad(), on_meta(), attending(block, TRIAL):
            block(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        return f"{name} does not run with other attention than its own ({str(error).partition(chr(10))[0]})"
    finally:
        _NOTES.reset(token)
    if len(notes) != 1:
        return f"{name} calls the attention of transformers' interface {len(notes)} times, not once"
    return f"{name}: its attention has {notes[0].problem}" if notes[0].problem else notes[0]


@contextmanager
def attending(model: nn.Module, name: str = CONTEXT_ATTENTION) -> Iterator[None]:
    """Meanwhile the model has this attention, and masks for it."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


_NOTES: ContextVar[list[SeenAttention] | None] = ContextVar("notes of attention", default=None)


def _note(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **asked: Any
) -> tuple[Tensor, None]:
    notes = _NOTES.get()
    assert notes is not None
    causal = asked.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    problem = unknown_to_context(asked) or ""
    if not problem and not (isinstance(attention_mask, _TrialMask) and attention_mask.plain):
        problem = "a mask of its model's own: a window, chunks, or what transformers' helpers did not make"
    notes.append(SeenAttention(query.shape[1], key.shape[1], query.shape[-1], bool(causal), problem))
    rows, heads, tokens, _ = query.shape
    return query.new_empty((rows, tokens, heads, value.shape[-1])), None


def _note_mask(
    *_: Any, mask_function: Any, attention_mask: Any = None, local_size: int | None = None, **__: Any
) -> _TrialMask:
    if isinstance(attention_mask, _TrialMask):
        return attention_mask  # helpers leave one that is made as it is
    return _TrialMask(plain_mask(mask_function, local_size))


AttentionInterface.register(TRIAL, _note)
AttentionMaskInterface.register(TRIAL, _note_mask)
