"""Which tokens of a sequence a rank holds, and in which order several ranks hold them together."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Factor, Layout, degree_of, sequence_pieces

__all__ = ["TokenOrder", "check_length", "chunks_of", "part_under", "tokens_of"]


def chunks_of(layout: Layout) -> int:
    """Into how many consecutive chunks a layout cuts a sequence: what its length must be a multiple of."""
    return degree_of(layout.sequence) * (2 if layout.zigzag else 1)


def check_length(layout: Layout, length: int, what: str) -> None:
    """Refuse a length that a layout does not divide; ``what``: whose layout it is."""
    chunks = chunks_of(layout)
    if length % chunks:
        ring = ", a ring in two chunks a rank" if layout.zigzag else ""
        raise InvalidInput(
            f"batch: sequences of {length} tokens cannot be divided over {degree_of(layout.sequence)} ranks, as {what} "
            f"would{ring}; pad them to a multiple of {chunks}"
        )


def tokens_of(layout: Layout, index: int, length: int) -> torch.Tensor:
    """The numbers of the tokens that rank ``index`` of a stage holds, in its order."""
    return torch.cat([torch.arange(run.start, run.stop) for run in sequence_pieces(layout, index, length)])


def part_under(layout: Layout, factors: Iterable[Factor]) -> Layout:
    """The layout in which only some of its factors divide the sequence, in the same order."""
    kept = frozenset(factors)
    return Layout(layout.rows, kept, layout.zigzag & kept, layout.inner & kept)


class TokenOrder:
    """The order of tokens where pieces of several ranks lie side by side, and how to put them into that of one layout.

    The pieces are those of ranks which differ in some factors of ``divided``; together they are this rank's piece under
    ``whole``, which lacks these.
    """

    def __init__(self, divided: Layout, whole: Layout, index: int, members: Iterable[int]) -> None:
        """``members``: numbers in the stage of the ranks whose pieces they are, in order."""
        self._divided, self._whole, self._index, self._members = divided, whole, index, tuple(members)
        self._known: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor] | None] = {}

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pieces side by side (along dim 1), put into the order of the whole."""
        found = self._orders(tensor)
        return tensor if found is None else tensor.index_select(1, found[0])

    def parted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The way back."""
        found = self._orders(tensor)
        return tensor if found is None else tensor.index_select(1, found[1])

    def _orders(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of all tokens along dim 1: the places of what comes first, second, … joined, and the same parted."""
        key = tensor.shape[1], tensor.device
        if key not in self._known:
            length = tensor.shape[1] * degree_of(self._whole.sequence)
            check_length(self._divided, length, "its layout")
            pieces = torch.cat([tokens_of(self._divided, member, length) for member in self._members])
            own = tokens_of(self._whole, self._index, length)
            if torch.equal(pieces, own):
                self._known[key] = None
            else:
                # Token numbers sort both alike, so that places in one are found by the number in the other.
                joined = pieces.argsort()[own.argsort().argsort()]
                self._known[key] = joined.to(tensor.device), joined.argsort().to(tensor.device)
        return self._known[key]
