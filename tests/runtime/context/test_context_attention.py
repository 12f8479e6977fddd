"""Attention over divided sequences gives what plain attention over the whole sequence gives, gradients too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from longer import longer
from ranks import ranks
from torch import Tensor
from torch.nn import functional

from galvatron.families.context import ContextMask, runs_seen
from galvatron.runtime.context import blocks, cuts, ring
from galvatron.runtime.context.attention import context_attention

_ROWS, _LENGTH, _WIDTH = 2, 24, 6


@dataclass(frozen=True)
class _Way:
    """How a sequence is divided, and what attention it has."""

    ring: int
    ulysses: int
    causal: bool = True
    masked: str = ""
    heads: tuple[int, int] = (8, 4)
    strip: int = 0
    """Scores of a strip; 0: as it is."""

    @property
    def world(self) -> int:
        return self.ring * self.ulysses


def _tensors(way: _Way) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    counts = (way.heads[0], way.heads[1], way.heads[1], way.heads[0])
    return [
        torch.randn(_ROWS, count, _LENGTH, _WIDTH, generator=generator, dtype=torch.float64) * 2 for count in counts
    ]


def _documents() -> Tensor:
    ends = torch.tensor([[5, 6, 17], [1, 12, 13]])
    return (torch.arange(_LENGTH)[None, :, None] >= ends[:, None]).sum(-1)


def _kept(*, left: bool) -> Tensor:
    kept = torch.arange(_LENGTH)[None] < torch.tensor([[24], [15]])
    return kept.flip(1) if left else kept


def _masks(way: _Way) -> tuple[Tensor | None, Tensor | None]:
    if way.masked == "documents":
        return _documents(), None
    return None, _kept(left=way.masked == "padding on the left") if way.masked else None


def _plain(way: _Way) -> list[Tensor]:
    """What one process computes of the whole sequence: the output, and the gradients of queries, keys and values."""
    *given, gradient = _tensors(way)
    leaves = [tensor.requires_grad_() for tensor in given]
    documents, kept = _masks(way)
    allowed = torch.ones(_ROWS, 1, _LENGTH, _LENGTH, dtype=torch.bool)
    if way.causal:
        allowed = allowed.tril()
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None])
    if kept is not None:
        allowed = allowed & kept[:, None, None]
    shared = way.heads[0] // way.heads[1]
    key, value = (own.repeat_interleave(shared, 1) for own in leaves[1:])
    scores = (leaves[0] @ key.transpose(-1, -2) * _WIDTH**-0.5).masked_fill(~allowed, -torch.inf)
    shares = torch.where(allowed.any(-1, keepdim=True), scores, 0.0).softmax(-1) * allowed.any(-1, keepdim=True)
    output = shares @ value
    torch.autograd.backward(output, gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _tokens(way: _Way, rank: int) -> Tensor:
    """Ring outermost, in zig-zag order; written here once more, as the oracle."""
    place, part = divmod(rank, way.ulysses)
    if way.ring == 1:
        own = torch.arange(_LENGTH)
    else:
        chunks = torch.arange(_LENGTH).chunk(2 * way.ring)
        own = torch.cat([chunks[place], chunks[2 * way.ring - 1 - place]])
    return own.chunk(way.ulysses)[part]


def _divided(way: _Way) -> list[Tensor]:
    """On a rank: its part of the same."""
    rank = dist.get_rank()
    names = ["", ""]
    numbers = range(way.world)
    for kind, size in enumerate((way.ring, way.ulysses)):
        of = (lambda own: own % way.ulysses) if kind == 0 else (lambda own: own // way.ulysses)
        for _, members in itertools.groupby(sorted(numbers, key=of), of):
            listed = list(members)
            group = dist.new_group(listed)
            if rank in listed and size > 1:
                names[kind] = group.group_name
    *given, gradient = _tensors(way)
    own = _tokens(way, rank)
    leaves = [tensor[:, :, own].clone().requires_grad_() for tensor in given]
    mask = ContextMask(names[0], names[1], runs_seen(*_masks(way)))
    module: Any = SimpleNamespace(is_causal=way.causal)
    with patch.object(blocks, "_STRIP_CELLS", way.strip or blocks._STRIP_CELLS):
        output, _ = context_attention(module, leaves[0], leaves[1], leaves[2], mask)
        torch.autograd.backward(output.transpose(1, 2), gradient[:, :, own])
    return [output.detach().transpose(1, 2), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _difference(way: _Way, found: list[list[Tensor]]) -> float:
    """The largest of any element of any rank."""
    worst = 0.0
    for rank, mine in enumerate(found):
        for ours, theirs in zip(mine, _plain(way), strict=True):
            worst = max(worst, float((ours - theirs[:, :, _tokens(way, rank)]).abs().max()))
    return worst


_MASKED = ("documents", "padding", "padding on the left")


@pytest.mark.parametrize(
    "way",
    [
        _Way(1, 2),
        _Way(2, 1),
        _Way(2, 2, masked="documents"),
        _Way(4, 1, masked="padding on the left"),
        _Way(1, 4, masked="documents", causal=False),
        _Way(3, 2, causal=False, masked="padding"),
        longer(_Way(3, 2)),
        *(longer(_Way(2, 2, masked=masked, causal=causal)) for masked in ("", *_MASKED) for causal in (True, False)),
        *(longer(_Way(4, 1, masked=masked, causal=causal)) for masked in ("", *_MASKED) for causal in (True, False)),
        *(longer(_Way(1, 4, masked=masked, causal=causal)) for masked in ("", *_MASKED) for causal in (True, False)),
        longer(_Way(4, 2, heads=(4, 2))),
        longer(_Way(2, 4, heads=(8, 8), masked="documents")),
        _Way(2, 1, masked="documents", strip=40),
        longer(_Way(1, 2, masked="documents", strip=400)),
    ],
    ids=str,
)
def test_equal_to_plain_attention(way: _Way) -> None:
    assert _difference(way, ranks(way.world).run(_divided, way)) < 1e-12


def _without_correction(total: tuple[Tensor, Tensor], tokens: slice, block: tuple[Tensor, Tensor]) -> None:
    """Blocks added up as if each had seen all keys."""
    total[0][:, :, tokens] += block[0]
    total[1][:, :, tokens] = torch.logaddexp(total[1][:, :, tokens], block[1])


def _in_order(self: cuts.Zigzag, rank: int) -> list[tuple[int, int]]:
    return [(rank * self.count, 0), (rank * self.count + self.each, self.each)]


def _without_later(self: cuts.Zigzag, *asked: Any, **more: Any) -> Any:
    """Queries behind a run of keys in a document do not see it."""
    return (cut for cut in _CUT(self, *asked, **more) if cut.diagonal or cut.queries.start < cut.keys.stop)


_CUT = cuts.Zigzag._cut


_BREAKS: dict[str, tuple[Any, str, Callable[..., Any], _Way]] = {
    "blocks are merged without their log-sum-exp": (ring, "merge", _without_correction, _Way(2, 1)),
    "documents are looked up as if slices were in order": (
        cuts.Zigzag,
        "chunks",
        _in_order,
        _Way(2, 1, masked="documents"),
    ),
    "padding does not see what is before it": (cuts.Zigzag, "_cut", _without_later, _Way(1, 2, masked="padding")),
}


def _broken(name: str) -> list[Tensor]:
    owner, attribute, instead, way = _BREAKS[name]
    with patch.object(owner, attribute, instead):
        return _divided(way)


@pytest.mark.parametrize("name", _BREAKS)
def test_breaks_show(name: str) -> None:
    way = _BREAKS[name][-1]
    assert _difference(way, ranks(way.world).run(_broken, name)) > 1e-3


def test_strips_are_the_whole() -> None:
    """Of one rank, without a group: strips of a few queries give what one strip gives."""
    query, key, value, gradient = _tensors(_Way(1, 1))
    whole = blocks.attend(query, key, value, diagonal=True, scale=0.3)
    back = blocks.attend_backward(gradient, (query, key, value), whole, diagonal=True, scale=0.3)
    with patch.object(blocks, "_STRIP_CELLS", _ROWS * 8 * _LENGTH * 5):
        strips = blocks.attend(query, key, value, diagonal=True, scale=0.3)
        again = blocks.attend_backward(gradient, (query, key, value), strips, diagonal=True, scale=0.3)
    torch.testing.assert_close((strips, again), (whole, back))
    stock = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(whole[0], stock)


def _alone(size: int, tensors: list[Tensor], causal: bool, runs: Tensor | None) -> list[Tensor]:
    """A whole ring in one process: each rank's cuts in turn, from tensors and the gradient of the result."""
    query, key, value, gradient = tensors
    tokens = cuts.Zigzag(size, query.shape[2] // size)
    numbers = [
        torch.cat([torch.arange(begin, begin + tokens.each) for begin, _ in tokens.chunks(rank)])
        for rank in range(size)
    ]
    output, *gradients = (torch.zeros_like(own, dtype=torch.float64) for own in (query, query, key, value))
    for rank, own in enumerate(numbers):
        mine, (total, lse) = query[:, :, own], blocks.nothing_yet(query[:, :, own], value.shape[-1])
        steps = []
        for source, others in enumerate(numbers):
            held = key[:, :, others], value[:, :, others]
            for cut in tokens.cuts(rank, source, runs, causal=causal):
                steps.append((cut, cut.of(mine, held), others[cut.keys]))
                found = blocks.attend(*steps[-1][1], diagonal=cut.diagonal, scale=0.2, regular=runs is None)
                blocks.merge((total[cut.rows], lse[cut.rows]), cut.queries, found)
        output[:, :, own] = total.double()
        for cut, parts, places in steps:
            outer, result, norms = (
                tensor[cut.rows, :, cut.queries] for tensor in (gradient[:, :, own], total.to(query.dtype), lse)
            )
            back = blocks.attend_backward(
                outer, parts, (result, norms), diagonal=cut.diagonal, scale=0.2, regular=runs is None
            )
            for sums, where, part in zip(gradients, (own[cut.queries], places, places), back, strict=True):
                sums[cut.rows, :, where] += part.double()
    return [output, *gradients]


_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.filterwarnings("ignore:.*no current CUDA context")  # of backward's thread, once
@pytest.mark.parametrize("masked", ["", "documents", "padding"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("device", ["cpu", _GPU])
def test_a_ring_in_one_process(device: str, causal: bool, masked: str) -> None:
    """With the kernels of the device. Those of a GPU, cuDNN's or flash, compute in bf16: theirs are errors of a figure
    in all, because some of the sums of hundreds of terms are near zero."""
    generator = torch.Generator().manual_seed(1)
    dtype, width, length = (torch.bfloat16, 64, 96) if device == "cuda" else (torch.float64, 8, 96)
    made = [torch.randn(2, heads, length, width, generator=generator).to(device, dtype) for heads in (8, 2, 2, 8)]
    leaves = [own.double().clone().requires_grad_() for own in made[:3]]
    marks = torch.randint(2, (2, length // 4), generator=generator).repeat_interleave(4, 1)
    documents = marks.cumsum(1) if masked == "documents" else None
    kept = marks.bool() | (torch.arange(length) == 0) if masked == "padding" else None
    allowed = torch.ones(2, 1, length, length, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if documents is not None:
        allowed &= (documents[:, :, None] == documents[:, None])[:, None]
    if kept is not None:
        allowed &= kept[:, None, None]
    attention: Any = functional.scaled_dot_product_attention
    expected = attention(*leaves, allowed.to(device), scale=0.2, enable_gqa=True)
    torch.autograd.backward(expected, made[3].double())
    found = _alone(3, made, causal, runs_seen(documents, kept))
    tolerance = 1e-2 if device == "cuda" else 1e-9
    for ours, theirs in zip(found, [expected.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert theirs is not None
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
