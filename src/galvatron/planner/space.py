"""The space of strategies: decision trees, the paper's takeaways that prune them, and the named spaces searched.

Paper Section 3.2. The baselines of Section 5.1 are restrictions of one space, so the same search answers for all of
them. Extensions beyond the paper are switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, permutations, product
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import (
    CONTEXT_KINDS,
    DENSE_KINDS,
    LAYER_SWITCHES,
    SWITCHES,
    Axis,
    Cluster,
    Kind,
    Strategy,
    Switches,
)

__all__ = [
    "CONTEXT_1",
    "CONTEXT_2",
    "EXPERTS_1",
    "EXPERTS_2",
    "EXPERT_RULES",
    "EXTENDED",
    "LONG_SEQUENCE",
    "PAPER",
    "RULES",
    "SPACES",
    "TAKEAWAY_1",
    "TAKEAWAY_2",
    "TAKEAWAY_3",
    "Rule",
    "Space",
    "Switches",
    "context_paths",
    "default_switches",
    "divisors",
    "pipeline_degrees",
    "space_named",
    "tree",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the space: what it says, and whether it merely prunes."""

    name: str
    statement: str
    forbids: Callable[[Strategy], bool] | None = None
    """What a pruning rule removes, which may be turned off; None: the rule is part of how the space is built."""

    @property
    def prunes(self) -> bool:
        return self.forbids is not None


TAKEAWAY_1 = Rule(
    "takeaway-1",
    "Pipeline stages are consecutive blocks of devices, so the pipeline crosses the slow links between islands.",
)
TAKEAWAY_2 = Rule(
    "takeaway-2",
    "Every parallelism divides devices into groups of equal size; only pipeline stages may differ in strategy.",
)
TAKEAWAY_3 = Rule(
    "takeaway-3",
    "DP and SDP are not combined in one layer.",
    forbids=lambda strategy: strategy.degree(Kind.DP) > 1 and strategy.degree(Kind.SDP) > 1,
)
RULES = (TAKEAWAY_1, TAKEAWAY_2, TAKEAWAY_3)
CONTEXT_1 = Rule(
    "context-1",
    "Beside Ring or Ulysses axes are in the order DP, SDP, Ring, Ulysses, TP: what can wait longest is outermost.",
    forbids=lambda strategy: strategy.context_degree > 1 and list(strategy.axes) != _in_order(strategy.axes),
)
CONTEXT_2 = Rule(
    "context-2",
    "A layer without attention has only such Ring and Ulysses axes as some layer of the model with attention can have.",
)
_CONTEXT_ORDER = (Kind.DP, Kind.SDP, Kind.RING, Kind.ULYSSES, Kind.TP)
"""Outermost first. Gradients are summed once an iteration, parameters gathered a layer ahead, keys and values passed on
behind attention; heads are exchanged and TP sums with nothing to hide behind, and TP sums more."""


def _in_order(axes: Iterable[Axis]) -> list[Axis]:
    return sorted(axes, key=lambda axis: _CONTEXT_ORDER.index(axis.kind))


EXPERTS_1 = Rule(
    "experts-1",
    "DP of the experts is their outermost axis: it communicates once an iteration, so it takes the slowest links.",
    forbids=lambda strategy: Kind.DP in {axis.kind for axis in strategy.experts[1:]},
)
EXPERTS_2 = Rule(
    "experts-2",
    "TP of the experts is that of the whole layer, or none.",
    forbids=lambda strategy: strategy.expert_factors(Kind.TP) not in (frozenset(), strategy.factors(Kind.TP)),
)
EXPERTS_3 = Rule(
    "experts-3",
    "Experts have no TP of their own beside sequence parallelism, under which TP ranks hold different tokens.",
    forbids=lambda strategy: strategy.sequence_parallel and bool(strategy.experts and strategy.expert_factors(Kind.TP)),
)
EXPERTS_4 = Rule(
    "experts-4",
    "Experts have no axes of their own in a layer that keeps some results or keeps them on the host.",
    forbids=lambda strategy: strategy.graded and bool(strategy.experts),
)
EXPERT_RULES = (EXPERTS_1, EXPERTS_2, EXPERTS_3, EXPERTS_4)
"""How the axes of experts are pruned; they hold in every space."""


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, the smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def pipeline_degrees(devices: int) -> tuple[int, ...]:
    """Degrees of pipeline parallelism: applied first, it divides the devices into equal stages (Takeaway #2)."""
    return divisors(devices)


def tree(devices: int, kinds: Iterable[Kind] = DENSE_KINDS) -> tuple[Strategy, ...]:
    """All paths of the decision tree for a stage of this many devices, without any flag."""
    if devices == 1:
        return (Strategy(),)
    return tuple(Strategy(axes) for axes in _paths(devices, tuple(kinds)))


def _paths(devices: int, kinds: tuple[Kind, ...]) -> Iterator[tuple[Axis, ...]]:
    for depth in range(1, len(kinds) + 1):
        for order in permutations(kinds, depth):
            for degrees in _ordered_factors(devices, depth):
                yield tuple(Axis(kind, degree) for kind, degree in zip(order, degrees, strict=True))


def context_paths(devices: int, kinds: frozenset[Kind], *, any_order: bool = False) -> Iterator[Strategy]:
    """The paths with Ring or Ulysses for a stage of this many devices: one for each choice of degrees (rule context-1),
    or one for each of its orders."""
    order = [kind for kind in _CONTEXT_ORDER if kind in kinds]
    for depth in range(1, len(order) + 1):
        for chosen in permutations(order, depth) if any_order else combinations(order, depth):
            if set(CONTEXT_KINDS) & set(chosen):
                for degrees in _ordered_factors(devices, depth):
                    yield Strategy(tuple(map(Axis, chosen, degrees)))


def _ordered_factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if number >= 2:
            yield (number,)
        return
    for first in divisors(number):
        if first >= 2:
            for rest in _ordered_factors(number // first, parts - 1):
                yield (first, *rest)


PAPER = Switches()
EXTENDED = Switches(**{switch.name: switch.default for switch in SWITCHES})


LONG_SEQUENCE = 16384
"""Tokens of a sample from which on context parallelism is searched where nobody says."""


def default_switches(cluster: Cluster, sequence_length: int | None = None) -> Switches:
    """What is searched where nobody says: some extensions only where islands differ in speed, offload only where the
    link to the host is known, context parallelism only for long sequences."""
    off = [switch.name for switch in SWITCHES if switch.uneven_links_only and not cluster.has_uneven_links]
    if not cluster.device.offloads:
        off.append("offload")
    long = (sequence_length or 0) >= LONG_SEQUENCE
    return replace(EXTENDED, context_parallel=long, zero3=long, **dict.fromkeys(off, False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A named set of strategies and pipeline degrees."""

    name: str
    title: str
    kinds: frozenset[Kind] = frozenset(Kind)
    pipeline: str = "any"
    """Degrees of pipeline parallelism: "any", "none" (1), "all" (one device a stage) or "even"."""
    fixed: bool = False
    """3D: one strategy for all layers, TP inside DP inside a pipeline, of degrees as equal as powers of two can be: two
    on 8 devices (DeepSpeed's suggestion, which the paper ran), four on 64. Two where devices are no power of two."""
    switches: Switches = PAPER
    confined: tuple[tuple[Kind, int], ...] = ()
    """Kinds of parallelism that must not leave islands of so many devices; 1: they are not used."""
    degree: int | None = None
    """The only degree of pipeline parallelism, where just one is searched."""
    limits: str = ""
    """The last two as a user said them."""

    def pipeline_degrees(self, devices: int) -> tuple[int, ...]:
        """Those that the limits leave, of which there must be one."""
        every = self._all_degrees(devices)
        if not self.confined and self.degree is None:
            return every
        left = [each for each in every if self.degree in (None, each)]
        usable = tuple(each for each in left if self._dense(devices // each))
        if not usable:
            stages = ", ".join(map(str, every))
            wider = "" if self.name == "full" else ", or use --space full"
            raise InvalidInput(
                f"{self.limits}: nothing is left of space {self.name!r} on {devices} devices, whose pipelines have "
                f"{stages} stages; allow more{wider}"
            )
        return usable

    def _all_degrees(self, devices: int) -> tuple[int, ...]:
        if self.pipeline == "none":
            return (1,)
        if self.pipeline == "all":
            return (devices,)
        if self.pipeline == "even":
            if devices % 4:
                raise InvalidInput(f"space 3d combines TP and PP: {devices} devices are not a multiple of 4")
            return (_root(devices, 3),)
        return pipeline_degrees(devices)

    @property
    def has_context(self) -> bool:
        """Whether layers may have Ring and Ulysses axes."""
        return self.switches.context_parallel and not self.fixed and set(CONTEXT_KINDS) <= self.kinds

    @property
    def has_experts(self) -> bool:
        """Whether the experts of a layer may have axes of their own."""
        return self.switches.expert_parallel and Kind.EP in self.kinds

    def strategies(self, devices: int, *, experts: bool = False) -> tuple[Strategy, ...]:
        """Candidates for a layer in a stage of this many devices.

        ``experts``: for a layer that has them; each candidate comes without and with each choice of axes for them.
        """
        candidates = self._dense(devices)
        if not experts:
            return candidates
        together = (replace(each, experts=own) for each in candidates for own in self.expert_axes(devices))
        return (*candidates, *(each for each in together if not _forbidden(each)))

    def expert_axes(self, devices: int) -> tuple[tuple[Axis, ...], ...]:
        """Axes that experts may have of their own; a strategy takes those whose TP is its own, and those without;
        with sequence parallelism only those without."""
        if not self.has_experts or devices == 1:
            return ()
        paths = _paths(devices, tuple(kind for kind in (Kind.EP, *DENSE_KINDS) if kind in self.kinds))
        return tuple(
            axes
            for axes in paths
            if Kind.EP in {axis.kind for axis in axes}
            and Kind.DP not in {axis.kind for axis in axes[1:]}
            and self._allows(axes)
        )

    def _allows(self, axes: tuple[Axis, ...]) -> bool:
        """Whether no rule and no limit forbids these axes."""
        if any(devices % factor.block for kind, devices in self.confined for factor in Strategy(axes).factors(kind)):
            return False
        return self.switches.hybrid_sharding or not (TAKEAWAY_3.forbids and TAKEAWAY_3.forbids(Strategy(axes)))

    def _dense(self, devices: int) -> tuple[Strategy, ...]:
        return _dense_strategies(self, devices)

    def dense_paths(self, devices: int) -> tuple[Strategy, ...]:
        """Paths of the decision tree that no rule and no limit forbids, without any switch."""
        if self.fixed:
            tensor = _root(devices, 2)
            data = (Axis(Kind.DP, devices // tensor),) if devices > tensor else ()
            paths: tuple[Strategy, ...] = (Strategy((*data, Axis(Kind.TP, tensor))),)
        else:
            paths = tree(devices, [kind for kind in DENSE_KINDS if kind in self.kinds])
            if self.has_context:
                paths += tuple(context_paths(devices, self.kinds, any_order=self.switches.context_orders))
        return tuple(path for path in paths if self._allows(path.axes))

    def flags(self, kinds: frozenset[Kind]) -> list[dict[str, Any]]:
        """Each combination of the switches that are on and that axes of these kinds can use."""
        usable = [
            switch.name
            for switch in reversed(LAYER_SWITCHES)
            if getattr(self.switches, switch.name) and switch.space_needs <= self.kinds and switch.possible(kinds)
        ]
        choices = product((False, True), repeat=len(usable))
        flagged: list[dict[str, Any]] = [dict(zip(usable, choice, strict=True)) for choice in choices]
        return [flags for flags in flagged if not _contradictory(flags)]


@lru_cache(maxsize=64)
def _dense_strategies(space: Space, devices: int) -> tuple[Strategy, ...]:
    """Kept, as advice asks for the same ones again and again: strategies remember what follows from their axes."""
    paths = space.dense_paths(devices)
    kinds = [frozenset(axis.kind for axis in path.axes) for path in paths]
    flags = {each: space.flags(each) for each in set(kinds)}
    return tuple(each for path, own in zip(paths, kinds, strict=True) for each in path.switched(flags[own]))


def _root(devices: int, degree: int) -> int:
    """The power of two nearest to the square or cube root of so many devices, at least two; two where they are no power
    of two."""
    if devices & (devices - 1):
        return 2
    return max(2, int(2 ** (((devices.bit_length() - 1) + (degree == 3)) // degree)))


def _contradictory(flags: dict[str, Any]) -> bool:
    return any(flags.get(switch.name) and flags.get(other) for switch in LAYER_SWITCHES for other in switch.without)


def _forbidden(strategy: Strategy) -> bool:
    return any(rule.forbids is not None and rule.forbids(strategy) for rule in EXPERT_RULES)


SPACES = (
    Space(name="full", title="every combination of DP, SDP, TP, EP, CP and PP"),
    Space(name="dp", title="data parallelism on all devices", kinds=frozenset({Kind.DP}), pipeline="none"),
    Space(name="tp", title="tensor parallelism on all devices", kinds=frozenset({Kind.TP}), pipeline="none"),
    Space(name="pp", title="one device a pipeline stage", kinds=frozenset(DENSE_KINDS), pipeline="all"),
    Space(name="sdp", title="sharded data parallelism on all devices", kinds=frozenset({Kind.SDP}), pipeline="none"),
    Space(
        name="3d",
        title="PP over DP over TP of one degree everywhere (2-way each on 8 devices)",
        kinds=frozenset(DENSE_KINDS),
        pipeline="even",
        fixed=True,
    ),
    Space(name="dp+tp", title="DP and TP, chosen layer by layer", kinds=frozenset({Kind.DP, Kind.TP}), pipeline="none"),
    Space(name="dp+pp", title="DP inside pipeline stages", kinds=frozenset({Kind.DP})),
)


def space_named(name: str, switches: Switches = PAPER) -> Space:
    """The space of this name with these switches."""
    for space in SPACES:
        if space.name == name:
            return replace(space, switches=switches)
    known = "; ".join(f"{space.name} ({space.title})" for space in SPACES)
    raise InvalidInput(f"space {name!r} is unknown; choose one of {known}")
