"""Ulysses: around attention, ranks exchange heads for tokens, so that each has all tokens of some of the heads."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.runtime import collectives
from galvatron.runtime.tensor_parallel import operators

__all__ = ["heads_to_tokens", "tokens_to_heads"]


def heads_to_tokens(tensor: Tensor, ulysses: str) -> Tensor:
    """From all heads of this rank's tokens to some heads of all tokens (rows, heads, tokens, width)."""
    exchanged: Tensor = _there(tensor, ulysses)
    return exchanged


def tokens_to_heads(tensor: Tensor, ulysses: str) -> Tensor:
    """The way back."""
    exchanged: Tensor = _back(tensor, ulysses)
    return exchanged


def _exchanged(tensor: Tensor, group: ProcessGroup, divided: int, joined: int) -> Tensor:
    """Every rank gets its part of the divided dim from all, joined along the other in the order of ranks."""
    if tensor.shape[divided] % group.size():
        raise InvalidInput(
            f"ulysses{group.size()}: {tensor.shape[divided]} heads, of queries or of keys and values, cannot be "
            f"divided over {group.size()} ranks; take a smaller degree, or a ring"
        )
    parts = tensor.unflatten(divided, (group.size(), -1)).movedim(divided, 0)
    received = collectives.all_to_all(parts.contiguous(), None, None, group)
    return received.movedim(0, joined).flatten(joined, joined + 1).contiguous()


_SCHEMA = "(Tensor tensor, str ulysses) -> Tensor"
_HEADS, _TOKENS = 1, 2


@operators.node("heads_to_tokens", _SCHEMA, sends=True)
def _there(tensor: Tensor, ulysses: str) -> Tensor:
    return _exchanged(tensor, collectives.group_named(ulysses), _HEADS, _TOKENS)


@operators.node("tokens_to_heads", _SCHEMA, sends=True)
def _back(tensor: Tensor, ulysses: str) -> Tensor:
    return _exchanged(tensor, collectives.group_named(ulysses), _TOKENS, _HEADS)


@_there.register_fake
def _(tensor: Tensor, ulysses: str) -> Tensor:
    rows, heads, tokens, width = tensor.shape
    ranks = collectives.group_named(ulysses).size()
    return tensor.new_empty((rows, heads // ranks, tokens * ranks, width))


@_back.register_fake
def _(tensor: Tensor, ulysses: str) -> Tensor:
    rows, heads, tokens, width = tensor.shape
    ranks = collectives.group_named(ulysses).size()
    return tensor.new_empty((rows, heads * ranks, tokens // ranks, width))


_there.register_autograd(
    lambda ctx, gradient: (_back(gradient, ctx.ulysses), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "ulysses", inputs[1]),
)
_back.register_autograd(
    lambda ctx, gradient: (_there(gradient, ctx.ulysses), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "ulysses", inputs[1]),
)
