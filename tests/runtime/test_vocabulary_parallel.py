"""A vocabulary split over ranks: cross-entropy and embedding against PyTorch's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import Tensor, nn
from torch.nn import functional

from galvatron.families.layer import IGNORED
from galvatron.runtime.tensor_parallel.vocabulary import SplitCrossEntropy, SplitEmbedding


def _words(vocabulary: int, rank: int, world: int) -> range:
    """This rank's words: equal shares, rounded up, until there are none left."""
    share = -(-vocabulary // world)
    held = [word for word in range(vocabulary) if word // share == rank]
    return range(held[0], held[-1] + 1) if held else range(vocabulary, vocabulary)


@dataclass(frozen=True)
class _Scores:
    logits: Tensor
    labels: Tensor
    gradient: float = 1.0


def _split_loss(given: list[_Scores]) -> list[tuple[Tensor, Tensor]]:
    """On a rank: the loss, and the gradient by its own logits."""
    assert dist.group.WORLD is not None
    found = []
    for one in given:
        words = _words(one.logits.shape[-1], dist.get_rank(), dist.get_world_size())
        mine = one.logits[..., words.start : words.stop].clone().requires_grad_()
        loss = SplitCrossEntropy(words, one.logits.shape[-1], dist.group.WORLD)(mine, one.labels)
        torch.autograd.backward(loss * one.gradient)
        assert mine.grad is not None
        found.append((loss.detach(), mine.grad))
    return found


def _check_losses(given: list[_Scores], *, rtol: float, atol: float) -> None:
    found = ranks(4).run(_split_loss, given)
    for number, one in enumerate(given):
        logits = one.logits.clone().requires_grad_()
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = functional.cross_entropy(
            wide.flatten(0, -2), one.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        torch.autograd.backward(loss * one.gradient)
        for mine in found:
            torch.testing.assert_close(mine[number][0], loss.detach(), rtol=rtol, atol=atol)
        joined = torch.cat([mine[number][1] for mine in found], -1)
        torch.testing.assert_close(joined, logits.grad, rtol=rtol, atol=atol)


def _random(vocabulary: int, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> _Scores:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = scale * torch.randn(3, 5, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (3, 5), generator=generator)
    return _Scores(logits.to(dtype), labels)


def test_uneven_vocabularies() -> None:
    """Down to one word a rank, ranks with a smaller share, and more ranks than words."""
    _check_losses([_random(vocabulary) for vocabulary in (64, 67, 10, 9, 5, 4, 3, 1)], rtol=1e-12, atol=1e-13)


def test_ignored_labels() -> None:
    some, none, word = _random(67), _random(10), _random(10)
    some.labels[0] = some.labels[2, 3] = IGNORED
    none.labels[:] = IGNORED
    word.labels[:] = 0
    _check_losses([some, none, word], rtol=1e-12, atol=1e-13)


def test_the_gradient_from_above_is_passed_on() -> None:
    one = _random(67)
    _check_losses([_Scores(one.logits, one.labels, gradient) for gradient in (0.25, -3.0)], rtol=1e-12, atol=1e-13)


def test_extreme_logits() -> None:
    """Differences far beyond what exp can hold, all equal, and single words that take everything."""
    huge, equal, single, low = _random(67, 1e4), _random(10), _random(67), _random(10)
    equal.logits[:] = 5e4
    single.logits[..., 66] = 1e30
    low.logits[:] = -1e30
    low.logits[..., 3] = -1e29
    _check_losses([huge, equal, single, low], rtol=1e-12, atol=1e-13)
    narrow = [_Scores(one.logits.float(), one.labels) for one in (huge, equal, single, low)]
    _check_losses(narrow, rtol=1e-5, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32() -> None:
    _check_losses([_random(67, dtype=torch.bfloat16), _random(1000, dtype=torch.bfloat16)], rtol=1e-2, atol=1e-4)
    for mine in ranks(4).run(_split_loss, [_random(67, dtype=torch.bfloat16)]):
        assert mine[0][0].dtype == torch.float32
        assert mine[0][1].dtype == torch.bfloat16


# Embedding


def _twice(given: _Scores) -> bool:
    """On a rank: whether the logits are what they were, and whether a second pass over one graph is refused."""
    assert dist.group.WORLD is not None
    words = _words(given.logits.shape[-1], dist.get_rank(), dist.get_world_size())
    part = given.logits[..., words.start : words.stop]
    mine = part.clone().requires_grad_()
    loss = SplitCrossEntropy(words, given.logits.shape[-1], dist.group.WORLD)(mine, given.labels)
    torch.autograd.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)
    return torch.equal(mine.detach(), part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_its_own_maps_are_written_over(dtype: torch.dtype) -> None:
    assert all(ranks(4).run(_twice, _random(64, dtype=dtype)))


def _split_lookup(weight: Tensor, ids: Tensor, padding: int | None, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """On a rank: the vectors, and the gradient of its own words."""
    assert dist.group.WORLD is not None
    words = _words(len(weight), dist.get_rank(), dist.get_world_size())
    mine = nn.Parameter(weight[words.start : words.stop].clone())
    stock = nn.Embedding(len(weight), weight.shape[1], padding_idx=padding)
    vectors = SplitEmbedding(mine, words, stock, dist.group.WORLD)(ids)
    torch.autograd.backward(vectors, gradient)
    assert mine.grad is not None
    return vectors.detach(), mine.grad


@pytest.mark.parametrize("vocabulary", [67, 12, 5, 3])
@pytest.mark.parametrize("padding", [None, 0, "last"])
def test_embedding(vocabulary: int, padding: int | str | None) -> None:
    """Repeated words add up; the padding word keeps no gradient, on whichever rank it is."""
    generator = torch.Generator().manual_seed(vocabulary)
    weight = torch.randn(vocabulary, 6, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocabulary, (4, 7), generator=generator)
    gradient = torch.randn(4, 7, 6, generator=generator, dtype=torch.float64)
    word = vocabulary - 1 if padding == "last" else padding
    assert not isinstance(word, str)
    ids[:, 0] = 0 if word is None else word
    stock = nn.Embedding(vocabulary, 6, padding_idx=word, _weight=weight.clone())
    expected = stock(ids)
    torch.autograd.backward(expected, gradient)
    found = ranks(4).run(_split_lookup, weight, ids, word, gradient)
    for vectors, _ in found:
        torch.testing.assert_close(vectors, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([own for _, own in found]), stock.weight.grad, rtol=1e-12, atol=1e-13)
