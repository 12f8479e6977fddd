"""A strategy: how one layer is spread over the devices of its stage, and what form its activations then have.

Knows nothing of models, links or costs. Paper Section 3.2: a path through a decision tree, outermost level first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.switches import LAYER_SWITCHES, Kind, LayerSwitches

__all__ = [
    "Axis",
    "Digit",
    "Form",
    "Kind",
    "Layout",
    "Strategy",
    "by_digits",
    "compatible",
    "degree_of",
    "gathered_digits",
    "lines_up",
    "prime_factors",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """One level of a decision tree: a kind and its degree."""

    kind: Kind
    degree: int


@dataclass(frozen=True, slots=True, order=True)
class Digit:
    """One prime factor of a rank's number inside its stage: ``rank // stride % radix``.

    When the stage size is a power of two the digits are the bits of the rank.
    """

    stride: int
    radix: int

    @property
    def block(self) -> int:
        """Ranks that one full turn of this digit covers."""
        return self.stride * self.radix


Layout = frozenset[Digit]
"""The digits that divide something: the batch of a layer, or the sequence of its activations."""


def degree_of(digits: Iterable[Digit]) -> int:
    """Into how many parts these digits divide something: the ranks that differ in them only."""
    return math.prod(digit.radix for digit in digits)


@dataclass(frozen=True, slots=True)
class Form:
    """How the activations between two layers are divided: nothing happens between layers with the same form."""

    rows: Layout
    """The digits that divide the batch."""
    sequence: Layout = frozenset()
    """The digits that divide each sample along its sequence; none without sequence parallelism."""

    @property
    def parts(self) -> int:
        """Into how many parts all of it is divided."""
        return degree_of(self.rows) * degree_of(self.sequence)


_AXIS = r"(?:s?dp|tp)[1-9][0-9]{0,6}"
_WRITTEN = LAYER_SWITCHES[::-1]
"""In the order of a strategy's text: "dp4+zero2+rc"."""
_FLAGS = "".join(rf"(?:\+{switch.text})?" for switch in _WRITTEN)
_TEXT = re.compile(rf"(?:(?P<axes>{_AXIS}(?:-{_AXIS})*)|single)(?P<flags>{_FLAGS})")


@dataclass(frozen=True)
class Strategy(LayerSwitches):
    """Axes from outermost (far apart devices) to innermost (neighbours), plus switches."""

    axes: tuple[Axis, ...] = ()

    @cached_property
    def devices(self) -> int:
        return math.prod(axis.degree for axis in self.axes)

    def degree(self, kind: Kind) -> int:
        return next((axis.degree for axis in self.axes if axis.kind is kind), 1)

    @cached_property
    def data_degree(self) -> int:
        """Into how many parts the batch is divided."""
        return self.degree(Kind.DP) * self.degree(Kind.SDP)

    def digits(self, *kinds: Kind) -> Layout:
        """The digits of the rank that the axes of these kinds own."""
        return _owned_digits(self.axes, kinds)

    @cached_property
    def layout(self) -> Layout:
        """The digits that divide the batch."""
        return self.digits(Kind.DP, Kind.SDP)

    @cached_property
    def sharding_digits(self) -> Layout:
        """The digits over which gradients and optimizer states are divided: those of SDP, or of DP under ZeRO-2."""
        return self.digits(Kind.DP if self.zero2 else Kind.SDP)

    @cached_property
    def form(self) -> Form:
        """Of the activations that the layer takes and gives."""
        return Form(self.layout, self.digits(Kind.TP) if self.sequence_parallel else frozenset())

    def __str__(self) -> str:
        axes = "-".join(f"{axis.kind}{axis.degree}" for axis in self.axes) or "single"
        return axes + "".join(f"+{switch.text}" for switch in _WRITTEN if getattr(self, switch.name))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The inverse of ``str``: ``"dp2-tp4+rc"``."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidInput(
                f"{text!r} is not a strategy; write axes outermost first with flags, such as 'dp2-tp4', "
                "'sdp8+rc', 'tp8+sp' or 'single'"
            )
        axes = []
        for part in match["axes"].split("-") if match["axes"] else []:
            name = "".join(takewhile(str.isalpha, part))
            axes.append(Axis(Kind(name), int(part[len(name) :])))
        flags = match["flags"].split("+")[1:]
        strategy = cls(tuple(axes), **{switch.name: switch.text in flags for switch in LAYER_SWITCHES})
        strategy.check()
        return strategy

    def check(self) -> None:
        """Reject what no decision tree holds: a kind twice, a degree below two, a switch without its axis."""
        kinds = [axis.kind for axis in self.axes]
        if len(set(kinds)) != len(kinds) or any(axis.degree < 2 for axis in self.axes):
            raise InvalidInput(f"strategy {str(self)!r}: each kind may appear once, with a degree of at least 2")
        for switch in LAYER_SWITCHES:
            if getattr(self, switch.name) and not switch.possible(frozenset(kinds)):
                raise InvalidInput(f"strategy {str(self)!r}: {switch.title} (+{switch.text}) needs {switch.condition}")


@lru_cache(maxsize=65536)
def _owned_digits(axes: tuple[Axis, ...], kinds: tuple[Kind, ...]) -> Layout:
    owned: set[Digit] = set()
    stride = math.prod(axis.degree for axis in axes)
    for axis in axes:
        for prime in prime_factors(axis.degree):
            stride //= prime
            if axis.kind in kinds:
                owned.add(Digit(stride, prime))
    return frozenset(owned)


@lru_cache(maxsize=1024)
def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors, largest first, so that the outermost digit of 12 devices is the 3 and the rest are bits."""
    factors: list[int] = []
    prime = 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return tuple(reversed(factors))


def compatible(first: Digit, second: Digit) -> bool:
    """Whether both digits can belong to one way of writing the rank (always true for powers of two)."""
    return first == second or second.stride % first.block == 0 or first.stride % second.block == 0


def gathered_digits(source: Layout, target: Layout, rows: int) -> Layout:
    """The digits an all-gather must span to turn a batch of so many rows laid out as ``source`` into ``target``.

    Slice-Gather (paper Section 4): slice the digits in target∖source, which is free, then all-gather those in
    source∖target. Where that cannot go digit by digit, all of the source is gathered first.
    """
    return source - target if by_digits(source, target, rows) else source


def by_digits(source: Layout, target: Layout, rows: int) -> bool:
    """Whether rows go from one layout to the other digit by digit: the two write ranks in one mixed radix, and there
    are rows enough to divide by the digits of both."""
    return lines_up(source, target) and rows % degree_of(source | target) == 0


def lines_up(source: Layout, target: Layout) -> bool:
    """Whether two layouts can be written in one mixed radix, so that slicing and gathering go digit by digit."""
    if all(digit.block & (digit.block - 1) == 0 for digit in source | target):
        return True  # bits of the rank
    return all(compatible(a, b) for a in source for b in target)
