"""A part of the sequence: what a layer reads of a batch when its sequences are divided over ranks (CP).

Positions and targets are made of the whole sequence and then divided; padding and documents stay whole, because
attention sees the keys of all ranks. The stock model hands a :class:`ContextMask` to its attention, which transformers
looks up by :data:`CONTEXT_ATTENTION`. Knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)

from galvatron.core.errors import InvalidInput
from galvatron.families.facts.blocks import rotates_by_length
from galvatron.families.layer import IGNORED, Batch

__all__ = [
    "CONTEXT_ATTENTION",
    "ContextMask",
    "causal_targets",
    "given_mask",
    "mask_given",
    "next_tokens",
    "plain_mask",
    "rotation_by_length",
    "runs_seen",
    "sliced",
    "steady_positions",
    "unknown_to_context",
]

CONTEXT_ATTENTION = "galvatron_context"
"""Name of the attention that sees the keys of other ranks, among transformers' own."""
_TARGETS = "shift_labels"
"""transformers' name for labels that are shifted already."""
_BY_TOKEN = frozenset({"input_ids", "token_type_ids", "position_ids", "labels"})


@dataclass(frozen=True, slots=True)
class ContextMask:
    """What attention has to know of sequences that are divided; in the place of a mask."""

    ring: str
    """Name of the group of ranks among which keys and values go round; empty: there is none."""
    ulysses: str
    """… and of that which exchanges heads for tokens."""
    runs: Tensor | None = None
    """Keys that are seen, where not every token sees all of its row: of each run of them its row, where its document
    begins and ends, and where it begins and ends itself (runs, 5). On the host, because it decides what a device
    computes. None: each row is one document without padding."""


def causal_targets(batch: Batch) -> Tensor:
    """The target of each position of a causal model: the next token; the last position has none."""
    if _TARGETS in batch:
        return batch[_TARGETS]
    return next_tokens(batch["labels"])


def next_tokens(labels: Tensor) -> Tensor:
    """The same of labels."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def rotation_by_length(model: nn.Module) -> str | None:
    """Why rotary positions of a model would differ between parts of a sequence; None: they would not."""
    for module in model.modules():
        named = getattr(module, "rope_type", None)
        for kind in named.values() if isinstance(named, Mapping) else [named]:
            if isinstance(kind, str) and rotates_by_length(kind):
                return (
                    f"{type(model).__name__} rotates by frequencies that depend on the longest position of a batch "
                    f"(rope_type {kind!r}), which a part of a sequence does not have"
                )
    return None


def steady_positions(config: Any) -> int | None:
    """Up to how many positions the rotary frequencies of a model do not depend on the longest one of a batch; None:
    they never do. ``config``: as transformers has it."""
    try:
        config = config.get_text_config()
    except ValueError:  # it has several
        return None
    given = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in [given, *(own for own in given.values() if isinstance(own, Mapping))]:
        kind = each.get("rope_type")
        if isinstance(kind, str) and rotates_by_length(kind):
            limits.append(each.get("original_max_position_embeddings") if kind == "longrope" else None)
    return min((limit or config.max_position_embeddings for limit in limits), default=None)


def sliced(
    batch: Batch, tokens: Tensor, groups: tuple[str, str], *, shifts: bool, separates: bool
) -> tuple[Batch, ContextMask]:
    """What some tokens of each row need, given in this order; the mask is for attention over the whole sequence.

    ``groups``: names of the ring and of Ulysses' group. ``shifts``: the target of a token is the label of the next one.
    ``separates``: positions that start anew in a row mean another document.
    """
    known = _BY_TOKEN | {"attention_mask"}
    strange = sorted(batch.keys() - known)
    if strange:
        raise InvalidInput(
            f"batch: {strange[0]} given, of which nobody knows whether it is divided with the sequence; leave it out, "
            "or plan without context parallelism (--no-context-parallel)"
        )
    whole = dict(batch)
    padding = whole.pop("attention_mask", None)
    if padding is not None and padding.ndim != 2:
        raise InvalidInput(
            f"batch: attention_mask has {padding.ndim} dims; where sequences are divided over ranks it must say of "
            "each token whether it is padding (samples, tokens)"
        )
    ids = whole.get("input_ids")
    documents = None
    if ids is not None:
        positions = whole.get("position_ids")
        if positions is None:
            whole["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        elif padding is None and separates:
            documents = find_packed_sequence_indices(positions)
    if shifts and "labels" in whole:
        whole[_TARGETS] = next_tokens(whole["labels"])
        del whole["labels"]
    for name, tensor in whole.items():
        if tensor.ndim != 2:
            raise InvalidInput(
                f"batch: {name} of shape {list(tensor.shape)} cannot be divided along the sequence; expected (samples, "
                "tokens), or plan without context parallelism (--no-context-parallel)"
            )
    parts = {name: tensor.index_select(1, tokens) for name, tensor in whole.items()}
    return parts, ContextMask(*groups, runs_seen(documents, None if padding is None else padding.bool()))


def runs_seen(documents: Tensor | None, kept: Tensor | None) -> Tensor | None:
    """For :class:`ContextMask`, from the number of each token's document, and whether it is none of padding (rows,
    tokens)."""
    if documents is not None and bool((documents == documents[:, :1]).all()):
        documents = None
    if kept is not None and bool(kept.all()):
        kept = None
    given = documents if kept is None else kept
    if given is None:
        return None
    rows = range(len(given))
    one, all_kept = torch.zeros(given.shape[1]), torch.ones(given.shape[1], dtype=torch.bool)
    by_row = zip(
        [one for _ in rows] if documents is None else documents.cpu(),
        [all_kept for _ in rows] if kept is None else kept.cpu(),
        strict=True,
    )
    return torch.cat([_runs_of_row(row, *marks) for row, marks in enumerate(by_row)])


def _runs_of_row(row: int, documents: Tensor, kept: Tensor) -> Tensor:
    another = documents[1:] != documents[:-1]
    firsts = _begins(another)
    lasts = torch.cat([firsts[1:], torch.tensor([len(kept)])])
    begins = _begins(another | (kept[1:] != kept[:-1]))
    ends = torch.cat([begins[1:], torch.tensor([len(kept)])])
    seen = kept[begins]
    document = torch.searchsorted(firsts, begins, right=True) - 1
    columns = (torch.full_like(begins, row), firsts[document], lasts[document], begins, ends)
    return torch.stack(columns, 1)[seen]


def _begins(changes: Tensor) -> Tensor:
    """Where tokens begin that are alike, from whether each token but the first differs from the one before it."""
    return torch.cat([torch.tensor([0]), changes.nonzero().flatten() + 1])


_UNKNOWN = {
    "sliding_window": "a sliding window",
    "softcap": "a soft cap of its scores",
    "s_aux": "sinks",
    "position_bias": "a bias of positions",
    "head_mask": "a mask of heads",
}


def unknown_to_context(asked: Mapping[str, Any]) -> str | None:
    """What a model asks of its attention that the one over divided sequences does not have; None: nothing."""
    return next((words for name, words in _UNKNOWN.items() if asked.get(name) is not None), None)


# For stock models that make masks in their own forward.

_GIVEN: ContextVar[ContextMask | None] = ContextVar("given mask", default=None)


@contextmanager
def given_mask(mask: ContextMask | None) -> Iterator[None]:
    """Meanwhile stock models get this from the helpers that make masks for our attention."""
    token = _GIVEN.set(mask)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def mask_given() -> ContextMask | None:
    """What :func:`given_mask` gives at present."""
    return _GIVEN.get()


_PLAIN = (causal_mask_function, bidirectional_mask_function)


def plain_mask(mask_function: Any, local_size: int | None, *, documents: bool = False) -> bool:
    """Whether a mask that transformers' helpers are asked for hides nothing, or the tokens behind each one, alone: no
    window, no chunks, and nothing that the model adds. ``documents``: those of packed rows may be apart."""
    parts = getclosurevars(mask_function).nonlocals.get("mask_functions", ()) if documents else ()
    packed = packed_sequence_mask_function.__qualname__
    kinds = [
        own in _PLAIN or getattr(own, "__qualname__", "").startswith(f"{packed}.") for own in parts or (mask_function,)
    ]
    return local_size is None and all(kinds)


def _made(*_: Any, mask_function: Any, local_size: int | None = None, **__: Any) -> ContextMask | None:
    """None, which attention refuses, for a mask of which it knows nothing: a batch may ask for another than a trial."""
    return mask_given() if plain_mask(mask_function, local_size, documents=True) else None


AttentionMaskInterface.register(CONTEXT_ATTENTION, _made)
