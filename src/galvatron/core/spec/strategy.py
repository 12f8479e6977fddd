"""A strategy: how one layer is spread over the devices of its stage, and what layout its activations then have.

Knows nothing of models, links or costs. Paper Section 3.2: a path through a decision tree, outermost level first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import takewhile
from operator import attrgetter

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.layout import Factor, Factors, Layout, prime_factors
from galvatron.core.spec.switches import CONTEXT_KINDS, DENSE_KINDS, LAYER_SWITCHES, Kind, LayerSwitches

__all__ = ["Axis", "Kind", "Strategy"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One level of a decision tree: a kind and its degree."""

    kind: Kind
    degree: int


_AXIS = rf"(?:{'|'.join(Kind)})[1-9][0-9]{{0,6}}"
_AXES = rf"{_AXIS}(?:-{_AXIS})*"
_WRITTEN = LAYER_SWITCHES[::-1]
"""In the order of a strategy's text: "dp4+zero2+rc"."""
_FLAGS = "".join(rf"(?:\+{switch.text})?" for switch in _WRITTEN)
_SWITCHES: Callable[[LayerSwitches], tuple[bool, ...]] = attrgetter(*(switch.name for switch in LAYER_SWITCHES))
_OF_AXES = (
    *("devices", "divided", "data_degree", "context_degree", "_factors", "_layouts"),
    *("batch_factors", "context_factors", "gradient_factors"),
)
"""What strategies with the same axes share."""
_TEXT = re.compile(rf"(?:(?P<axes>{_AXES})|single)(?:/(?P<experts>{_AXES}))?(?P<flags>{_FLAGS})")


@dataclass(frozen=True)
class Strategy(LayerSwitches):
    """Axes from outermost (far apart devices) to innermost (neighbours), plus switches."""

    axes: tuple[Axis, ...] = ()
    experts: tuple[Axis, ...] = ()
    """The axes of the layer's experts over the same devices; empty: the experts follow the rest of the layer."""

    def __post_init__(self) -> None:
        for given in (self.axes, self.experts):
            if not isinstance(given, tuple) or not all(isinstance(axis, Axis) for axis in given):
                raise InvalidInput(
                    f"strategy: {given!r} given as axes; expected a tuple of Axis, or Strategy.parse('dp2-tp4')"
                )

    @cached_property
    def devices(self) -> int:
        return math.prod(axis.degree for axis in self.axes)

    def degree(self, kind: Kind) -> int:
        for axis in self.axes:
            if axis.kind is kind:
                return axis.degree
        return 1

    def switched(self, choices: Iterable[Mapping[str, bool]]) -> Iterator[Strategy]:
        """The same axes with each of these choices of switches. What follows from axes alone is worked out once."""
        known = {name: getattr(self, name) for name in (*_FIELDS, *_OF_AXES)}
        for switches in choices:
            made = object.__new__(Strategy)  # tens of thousands on large clusters; dataclasses.replace is slower
            vars(made).update(known, **switches)
            yield made

    @cached_property
    def data_degree(self) -> int:
        """Into how many parts the batch is divided."""
        return self.degree(Kind.DP) * self.degree(Kind.SDP)

    def factors(self, *kinds: Kind) -> Factors:
        """The factors of the rank that the axes of these kinds own."""
        if kinds not in self._factors:
            self._factors[kinds] = _owned_factors(self.axes, kinds)
        return self._factors[kinds]

    @cached_property
    def _factors(self) -> dict[tuple[Kind, ...], Factors]:
        return {}

    @cached_property
    def switches(self) -> tuple[bool, ...]:
        """In the order of LAYER_SWITCHES."""
        return _SWITCHES(self)

    @cached_property
    def divided(self) -> tuple[int, int, int]:
        """Degrees of what divides a sample: TP, ring and Ulysses."""
        return self.degree(Kind.TP), self.degree(Kind.RING), self.degree(Kind.ULYSSES)

    def expert_factors(self, *kinds: Kind) -> Factors:
        """The factors of the rank that the axes of these kinds own for the experts."""
        return _owned_factors(self.experts or self.axes, kinds)

    @property
    def graded(self) -> bool:
        """Whether the layer keeps some results for backward and recomputes the rest, or keeps them on the host."""
        return self.selective_recompute or self.recompute_but_attention or self.offload

    @cached_property
    def token_slices(self) -> Factors:
        """The factors by which TP ranks, which hold the same tokens, divide these among them before their experts."""
        return self.factors(Kind.TP) - self.expert_factors(Kind.TP)

    @cached_property
    def batch_factors(self) -> Factors:
        """The factors that divide the batch."""
        return self.factors(Kind.DP, Kind.SDP)

    @cached_property
    def context_factors(self) -> Factors:
        """The factors of context parallelism (CP), which divide the sequence everywhere: those of Ring and Ulysses."""
        return self.factors(*CONTEXT_KINDS)

    @cached_property
    def context_degree(self) -> int:
        """Into how many parts context parallelism divides the sequence."""
        return self.degree(Kind.RING) * self.degree(Kind.ULYSSES)

    @cached_property
    def gradient_factors(self) -> Factors:
        """The factors over which gradients are summed: ranks that differ in them have the same parameters, but other
        samples or other tokens."""
        return self.batch_factors | self.context_factors

    @cached_property
    def sharding_factors(self) -> Factors:
        """The factors over which gradients and optimizer states are divided: those of SDP, or of DP under ZeRO-2, each
        together with those of context parallelism; under ZeRO-3 the latter alone."""
        if self.zero2 or self.zero3:
            return self.factors(Kind.DP) | self.context_factors
        sharded = self.factors(Kind.SDP)
        return sharded | self.context_factors if sharded else sharded

    @cached_property
    def replica_factors(self) -> Factors:
        """The factors over which gradients are summed and nothing is divided."""
        return self.gradient_factors - self.sharding_factors

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters are divided too, and gathered where they are needed: SDP, ZeRO-3."""
        return bool(self.sharding_factors) and not self.zero2

    @cached_property
    def layout(self) -> Layout:
        """Of the activations that the layer takes and gives."""
        if self.sequence_parallel not in self._layouts:
            self._layouts[self.sequence_parallel] = self._made_layout()
        return self._layouts[self.sequence_parallel]

    @cached_property
    def _layouts(self) -> dict[bool, Layout]:
        """With and without sequence parallelism."""
        return {}

    def _made_layout(self) -> Layout:
        tensor = self.factors(Kind.TP) if self.sequence_parallel else frozenset()
        ulysses = self.factors(Kind.ULYSSES)
        crossed = any(outer > inner for outer in tensor for inner in ulysses)
        return Layout(
            rows=self.batch_factors,
            sequence=self.context_factors | tensor,
            zigzag=self.factors(Kind.RING),
            inner=tensor if crossed else frozenset(),
        )

    def __str__(self) -> str:
        axes = _written(self.axes) or "single"
        experts = f"/{_written(self.experts)}" if self.experts else ""
        return axes + experts + "".join(f"+{switch.text}" for switch in _WRITTEN if getattr(self, switch.name))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The inverse of ``str``: ``"dp2-tp4+rc"``; with axes for the experts ``"dp2-tp4/ep8+rc"``."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInput(
                f"{text!r} is not a strategy; write axes outermost first with flags, such as 'dp2-tp4', "
                "'sdp8+rc', 'tp8+sp' or 'single'; axes of the experts follow a slash, such as 'sdp8/ep8'"
            )
        flags = match["flags"].split("+")[1:]
        switches = {switch.name: switch.text in flags for switch in LAYER_SWITCHES}
        strategy = cls(_axes(match["axes"]), _axes(match["experts"]), **switches)
        strategy.check()
        return strategy

    def check(self) -> None:
        """Reject what no decision tree holds: a kind twice, a degree below two, a switch without its axis, axes of the
        experts that do not go with those of the layer."""
        kinds = [axis.kind for axis in self.axes]
        for axes in (self.axes, self.experts):
            if len({axis.kind for axis in axes}) != len(axes) or any(axis.degree < 2 for axis in axes):
                raise InvalidInput(f"strategy {str(self)!r}: each kind may appear once, with a degree of at least 2")
        if not set(kinds) <= {*DENSE_KINDS, *CONTEXT_KINDS}:
            raise InvalidInput(
                f"strategy {str(self)!r}: ep is for the experts of a layer; write it after a slash, such as 'dp8/ep8'"
            )
        if self.experts:
            self._check_experts()
        for switch in LAYER_SWITCHES:
            if getattr(self, switch.name) and not switch.possible(frozenset(kinds)):
                raise InvalidInput(f"strategy {str(self)!r}: {switch.title} (+{switch.text}) needs {switch.condition}")
            for other in LAYER_SWITCHES:
                if getattr(self, switch.name) and other.name in switch.without and getattr(self, other.name):
                    raise InvalidInput(
                        f"strategy {str(self)!r}: {switch.title} (+{switch.text}) and {other.title} (+{other.text}) "
                        "exclude each other; leave one of them out"
                    )

    def _check_experts(self) -> None:
        """Whether each device has a place among the experts, and has the tokens that its part of an expert needs."""
        if set(CONTEXT_KINDS) & {axis.kind for axis in self.experts}:
            raise InvalidInput(
                f"strategy {str(self)!r}: ring and ulysses divide sequences for the whole layer; after the slash write "
                "ep, with dp, sdp or tp beside it, over the same devices"
            )
        if Kind.EP not in {axis.kind for axis in self.experts}:
            raise InvalidInput(
                f"strategy {str(self)!r}: the axes of the experts have no ep; leave them out, and the experts follow "
                "the rest of the layer"
            )
        covered = math.prod(axis.degree for axis in self.experts)
        if covered != self.devices:
            raise InvalidInput(
                f"strategy {str(self)!r}: the axes of the experts are for {covered} devices, those of the layer for "
                f"{self.devices}; both must be for the same"
            )
        if not self.expert_factors(Kind.TP) <= self.factors(Kind.TP):
            raise InvalidInput(
                f"strategy {str(self)!r}: tp of the experts joins devices that tp of the layer does not; they would "
                "lack each other's tokens"
            )
        if self.sequence_parallel and self.expert_factors(Kind.TP):
            raise InvalidInput(
                f"strategy {str(self)!r}: the ranks of the experts' tp hold different tokens under +sp; leave one of "
                "them out"
            )


_FIELDS = tuple(each.name for each in fields(Strategy))


def _written(axes: tuple[Axis, ...]) -> str:
    return "-".join(f"{axis.kind}{axis.degree}" for axis in axes)


def _axes(text: str | None) -> tuple[Axis, ...]:
    axes = []
    for part in text.split("-") if text else []:
        name = "".join(takewhile(str.isalpha, part))
        axes.append(Axis(Kind(name), int(part[len(name) :])))
    return tuple(axes)


@lru_cache(maxsize=65536)
def _owned_factors(axes: tuple[Axis, ...], kinds: tuple[Kind, ...]) -> Factors:
    owned: set[Factor] = set()
    stride = math.prod(axis.degree for axis in axes)
    for axis in axes:
        for prime in prime_factors(axis.degree):
            stride //= prime
            if axis.kind in kinds:
                owned.add(_factor(stride, prime))
    return frozenset(owned)


@lru_cache(maxsize=4096)
def _factor(stride: int, size: int) -> Factor:
    """One object for equal factors, so that sets of them are soon compared."""
    return Factor(stride, size)
