"""Attention of some queries to some keys, with the log-sum-exp of each query's scores, by which results are merged.

Tensors are (rows, heads, tokens, width); several heads of queries may share one of keys and values. Queries see all
keys, or along the diagonal each itself and those before it: what documents and padding hide is cut off before
(:mod:`galvatron.runtime.context.cuts`). On GPUs cuDNN's kernel computes it where PyTorch would take that for a whole
sequence, else PyTorch's flash kernel; everywhere else plain products do, a strip of queries at a time, so that no map
of all scores ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

__all__ = ["attend", "attend_backward", "merge", "nothing_yet"]

_STRIP_CELLS = 1 << 25
"""Scores of a strip at most."""
_WIDEST_FLASH = 256


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, diagonal: bool, scale: float, regular: bool = False
) -> tuple[Tensor, Tensor]:
    """The weighted values (rows, heads, queries, width) and the log-sum-exp (rows, heads, queries) of the scores.

    ``regular``: tensors have the same shapes again and again, for each of which cuDNN makes a plan that takes a while.
    """
    if regular and _cudnn(query, key, value, diagonal=diagonal, scale=scale):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, diagonal, False, scale=scale
        )
        return found[0], found[1][..., 0]
    if _flash(query, value):
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, diagonal, False, scale=scale)
        return found[0], found[1]
    output = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=_wide(query))
    for strip, keys, scores in _strips(query, key, scale, diagonal=diagonal):
        norms = torch.logsumexp(scores, -1)
        shares = torch.exp(scores - norms[..., None])
        output[:, :, strip] = _times(shares, value[:, :, keys]).to(output.dtype)
        lse[:, :, strip] = norms
    return output, lse


def attend_backward(
    gradient: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    *,
    diagonal: bool,
    scale: float,
    regular: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. ``result``: of all keys, these and those of other blocks, because shares are
    relative to all."""
    query, key, value = tensors
    output, lse = result
    # Kernels take the log-sum-exp as one piece, and states of a generator, of which they take no notice here.
    if regular and _cudnn(query, key, value, diagonal=diagonal, scale=scale):
        taken = gradient.contiguous(), query, key, value, output.contiguous(), lse.contiguous()[..., None]
        state = torch.zeros((), dtype=torch.int64, device=query.device)
        lengths = None, None, query.shape[2], key.shape[2]
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *taken, state, state, None, *lengths, 0.0, diagonal, scale=scale
        )
        return found[0], found[1], found[2]
    if _flash(query, value):
        taken = gradient.contiguous(), query, key, value, output.contiguous(), lse.contiguous()
        states = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *taken, None, None, query.shape[2], key.shape[2], 0.0, diagonal, *states, scale=scale
        )
        return found[0], found[1], found[2]
    wide = _wide(query)
    by_query = torch.zeros_like(query)
    by_key, by_value = (torch.zeros_like(own, dtype=wide) for own in (key, value))
    for strip, keys, scores in _strips(query, key, scale, diagonal=diagonal):
        coming = gradient[:, :, strip].to(wide)
        shares = torch.exp(scores - lse[:, :, strip, None])
        by_value[:, :, keys] += _summed_heads(shares, coming, value.shape[1])
        inner = (coming * output[:, :, strip]).sum(-1, keepdim=True)
        by_scores = shares * (_scores(coming, value[:, :, keys]) - inner) * scale
        by_query[:, :, strip] = _times(by_scores, key[:, :, keys]).to(query.dtype)
        by_key[:, :, keys] += _summed_heads(by_scores, query[:, :, strip].to(wide), key.shape[1])
    return by_query, by_key.to(key.dtype), by_value.to(value.dtype)


def nothing_yet(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What has been attended to before the first block: none, in a type to add up in."""
    wide = _wide(query)
    shape = query.shape[:-1]
    return query.new_zeros((*shape, width), dtype=wide), query.new_full(shape, -torch.inf, dtype=wide)


def merge(total: tuple[Tensor, Tensor], tokens: slice, block: tuple[Tensor, Tensor]) -> None:
    """Add what a block of keys gives some queries to what others gave them, in place.

    Each was normalised by its own log-sum-exp: the sum of both is exp(a) + exp(b), and each counts by its share of it.
    """
    output, lse = total
    before, own = lse[:, :, tokens], block[1].to(lse.dtype)
    after = torch.logaddexp(before, own)
    output[:, :, tokens] *= torch.exp(before - after)[..., None]
    output[:, :, tokens] += block[0].to(output.dtype) * torch.exp(own - after)[..., None]
    lse[:, :, tokens] = after


def _cudnn(query: Tensor, key: Tensor, value: Tensor, *, diagonal: bool, scale: float) -> bool:
    """Whether PyTorch's own attention would take cuDNN's kernel for these."""
    if not query.is_cuda:
        return False
    chosen = torch._fused_sdp_choice(
        query, key, value, None, 0.0, diagonal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return bool(chosen == SDPBackend.CUDNN_ATTENTION.value)


def _flash(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash kernel takes these."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] == width <= _WIDEST_FLASH
        and width % 8 == 0
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _strips(query: Tensor, key: Tensor, scale: float, *, diagonal: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, strip by strip, the keys up to the last that one of them sees, and the scores of these (rows, heads,
    strip, keys)."""
    rows, heads, queries, _ = query.shape
    count = key.shape[2]
    each = max(1, _STRIP_CELLS // max(1, rows * heads * count))
    for begin in range(0, queries, each):
        strip = slice(begin, min(begin + each, queries))
        keys = slice(0, strip.stop if diagonal else count)
        scores = _scores(query[:, :, strip].to(_wide(query)), key[:, :, keys]) * scale
        if diagonal:
            places = torch.arange(count, device=query.device)
            scores = scores.masked_fill(places[strip, None] < places[None, keys], -torch.inf)
        yield strip, keys, scores


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """(rows, heads, queries, keys): products of each query with each key of its head."""
    rows, heads, queries, width = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, width)
    return (grouped @ key.to(query.dtype).transpose(-1, -2)).view(rows, heads, queries, -1)


def _times(shares: Tensor, value: Tensor) -> Tensor:
    """(rows, heads, queries, width): the values of each head by their shares."""
    rows, heads, queries, keys = shares.shape
    grouped = shares.reshape(rows, value.shape[1], -1, keys)
    return (grouped @ value.to(shares.dtype)).view(rows, heads, queries, -1)


def _summed_heads(shares: Tensor, given: Tensor, heads: int) -> Tensor:
    """(rows, heads of keys, keys, width): summed over queries, and over heads of queries that share one."""
    rows, _, _, keys = shares.shape
    grouped = shares.reshape(rows, heads, -1, keys)
    return grouped.transpose(-1, -2) @ given.reshape(rows, heads, -1, given.shape[-1])
