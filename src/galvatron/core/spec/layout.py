"""How activations lie on the ranks of a stage: factors of a rank's number, and what they divide.

Knows nothing of models, links or costs. Slice-Gather (paper Section 4) goes from one layout to another; what it gathers
is said here, once, for its price and for the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from galvatron.core.errors import InvalidInput

__all__ = [
    "Factor",
    "Factors",
    "Layout",
    "SequenceChange",
    "compatible",
    "coordinate",
    "degree_of",
    "factor_by_factor",
    "gathered_factors",
    "lines_up",
    "prime_factors",
    "sequence_change",
    "sequence_pieces",
]


@dataclass(frozen=True, slots=True, order=True)
class Factor:
    """One prime factor of a rank's number inside its stage: ``rank // stride % size``.

    When the stage size is a power of two the factors are the bits of the rank.
    """

    stride: int
    size: int

    @property
    def block(self) -> int:
        """Ranks that one full turn of this factor covers."""
        return self.stride * self.size


Factors = frozenset[Factor]
"""The factors that divide something: the batch of a layer, or the sequence of its activations."""


def degree_of(factors: Iterable[Factor]) -> int:
    """Into how many parts these factors divide something: the ranks that differ in them only."""
    return math.prod(factor.size for factor in factors)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the activations between two layers are divided: nothing happens between layers with the same layout."""

    rows: Factors
    """The factors that divide the batch."""
    sequence: Factors = frozenset()
    """The factors that divide each sample along its sequence: those of context parallelism, and under sequence
    parallelism those of TP."""
    zigzag: Factors = frozenset()
    """Of these, the ones of a ring, which divide the sequence first: see :func:`sequence_pieces`."""
    inner: Factors = frozenset()
    """Of these, the ones that divide it last although their strides are not the smallest: TP's outside of Ulysses'."""

    @property
    def parts(self) -> int:
        """Into how many parts all of it is divided."""
        return degree_of(self.rows) * degree_of(self.sequence)

    @property
    def order(self) -> tuple[Factor, ...]:
        """The factors of the sequence in the order in which they divide it, the first one first."""
        return _order(self)


@lru_cache(maxsize=65536)
def _order(layout: Layout) -> tuple[Factor, ...]:
    rest = layout.sequence - layout.zigzag - layout.inner
    parts = (layout.zigzag, rest, layout.inner)
    return tuple(factor for part in parts for factor in sorted(part, reverse=True))


@dataclass(frozen=True, slots=True)
class SequenceChange:
    """What happens to the sequences of activations between two layouts: gathered, then sliced.

    Both concern the pieces that ranks have of what ``kept`` leaves whole, in the layouts' order.
    """

    kept: tuple[Factor, ...]
    """Factors that divide the sequence before, meanwhile and after."""
    gathered: tuple[Factor, ...]
    """Factors of the source over which pieces are gathered."""
    sliced: tuple[Factor, ...]
    """Factors of the target by which pieces are sliced."""


@lru_cache(maxsize=1024)
def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors, largest first, so that the outermost factor of 12 devices is the 3 and the rest are bits."""
    factors: list[int] = []
    prime = 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return tuple(reversed(factors))


def compatible(first: Factor, second: Factor) -> bool:
    """Whether both factors can belong to one way of writing the rank (always true for powers of two)."""
    return first == second or second.stride % first.block == 0 or first.stride % second.block == 0


def gathered_factors(source: Factors, target: Factors, rows: int) -> Factors:
    """The factors an all-gather must span to turn a batch of so many rows laid out as ``source`` into ``target``.

    Slice-Gather (paper Section 4): slice the factors in target∖source, which is free, then all-gather those in
    source∖target. Where that cannot go factor by factor, all of the source is gathered first.
    """
    return source - target if factor_by_factor(source, target, rows) else source


def factor_by_factor(source: Factors, target: Factors, rows: int) -> bool:
    """Whether rows go from one layout to the other factor by factor: the two write ranks in one mixed radix, and there
    are rows enough to divide by the factors of both."""
    return lines_up(source, target) and rows % degree_of(source | target) == 0


def lines_up(source: Factors, target: Factors) -> bool:
    """Whether two layouts can be written in one mixed radix, so that slicing and gathering go factor by factor."""
    if all(factor.block & (factor.block - 1) == 0 for factor in source | target):
        return True  # bits of the rank
    return all(compatible(a, b) for a in source for b in target)


def sequence_change(source: Layout, target: Layout) -> SequenceChange:
    """How sequences go from one layout to the other.

    Sequences that are divided alike stay as they are, whatever happens to rows. Where rows stay as they are, what both
    divide first stays divided. Otherwise the whole sequence is gathered and sliced anew.
    """
    before, after = source.order, target.order
    alike = source.zigzag == target.zigzag
    if alike and (before == after or source.rows == target.rows):
        common = 0
        while common < min(len(before), len(after)) and before[common] == after[common]:
            common += 1
        return SequenceChange(before[:common], before[common:], after[common:])
    return SequenceChange((), before, after)


def coordinate(index: int, factors: Iterable[Factor]) -> int:
    """A rank's number along some factors, as in a mesh of their sizes in this order, the outermost first."""
    value = 0
    for factor in factors:
        value = value * factor.size + index // factor.stride % factor.size
    return value


def sequence_pieces(layout: Layout, index: int, length: int) -> tuple[range, ...]:
    """The tokens of a sequence that rank ``index`` of the stage holds, as runs in the order in which it has them.

    A ring of R ranks cuts the sequence into 2R chunks, of which rank r has r and 2R−1−r, so that causal attention is
    the same work for each (zig-zag). The other factors divide what a rank of the ring has into consecutive parts.
    """
    ring, rest = degree_of(layout.zigzag), degree_of(layout.sequence - layout.zigzag)
    if length % (2 * ring * rest if ring > 1 else rest):
        raise InvalidInput(
            f"a sequence of {length} tokens cannot be divided by a ring of {ring} and {rest} parts of each of its "
            f"pieces; expected a multiple of {2 * ring * rest if ring > 1 else rest}"
        )
    order = layout.order
    rings = len(layout.zigzag)
    number, part = coordinate(index, order[:rings]), coordinate(index, order[rings:])
    if ring == 1:
        return (range(part * (length // rest), (part + 1) * (length // rest)),)
    chunk, size = length // (2 * ring), length // (ring * rest)
    first, last = part * size, (part + 1) * size  # of the two chunks, laid one behind the other
    runs = []
    for place, start in ((0, number * chunk), (chunk, (2 * ring - 1 - number) * chunk)):
        low, high = max(first, place), min(last, place + chunk)
        if low < high:
            runs.append(range(start + low - place, start + high - place))
    return tuple(runs)
