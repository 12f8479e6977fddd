"""All that a layer may take in a stage, with its prices: strategies, and strategies with a choice for their experts.

Strategies and choices are priced apart and then added up. For one combination of batch and micro-batches a choice that
another one of its class beats in all prices is left out, and so is a strategy with its choice when another such pair
beats it in the same layout: neither can be missed in an optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import LayerSpec, ModelSpec, Strategy
from galvatron.planner.cost import NEVER, CostModel, Integers, StageCosts, Tables, held_bytes
from galvatron.planner.cost.allowed import allowed
from galvatron.planner.cost.arrays import Places
from galvatron.planner.search.bounds import Floats, few, hull_multipliers
from galvatron.planner.search.experts import Classes, ExpertChoices
from galvatron.planner.search.thinning import undominated
from galvatron.planner.space import Space

__all__ = ["CandidateTables", "Candidates", "Columns", "Lean", "Prices"]

Number = TypeVar("Number", np.int64, np.float64)
_FEW = 3
"""Multipliers at which choices for experts are looked at, to find those of the whole."""
_FAR = 4 * NEVER
"""Beyond all that can be done, even with a price added to it."""


def _attended(model: ModelSpec, strategies: Sequence[Strategy]) -> list[Strategy]:
    """Those of which the model attends the context axes: asked once for each way to divide a sample."""
    known: dict[tuple[tuple[int, int, int], bool], bool] = {}
    for each in strategies:
        key = each.divided, each.sequence_parallel
        if key not in known:
            known[key] = model.attends(each)
    return [each for each in strategies if known[each.divided, each.sequence_parallel]]


@dataclass(frozen=True, slots=True)
class Columns:
    """The candidates of one combination, a column each."""

    tables: Tables
    """(T, S)"""
    strategy: Places
    """(S,) the strategy, without axes of its own for experts."""
    choice: Places
    """(S,) the choice for the experts; −1: they follow the rest of the layer."""


@dataclass(frozen=True, slots=True)
class CandidateTables:
    """Tables of combinations, not yet put together."""

    plain: Tables
    """(…, T, S) of strategies whose experts, if there are any, follow the rest of the layer."""
    own: tuple[Tables, Tables] | None
    """Where experts may have axes of their own: what layers cost without them, and what the choices add."""
    classes: Classes | None = None
    """Then: which go together."""

    def of(self, place: int) -> CandidateTables:
        """Those of one combination."""
        own = None if self.own is None else (_at(self.own[0], place), _at(self.own[1], place))
        return CandidateTables(_at(self.plain, place), own, self.classes)


@dataclass(frozen=True, slots=True)
class Lean:
    """Of one kind of layer, the candidates that may need least memory, (N,) each."""

    strategy: Places
    """Without axes of its own for experts."""
    state_bytes: Integers
    activation_bytes: Integers
    transient_bytes: Integers

    def at(self, places: Places) -> Lean:
        return Lean(*(getattr(self, each.name)[places] for each in fields(Lean)))

    def beside(self, other: Lean) -> Lean:
        """Both together."""
        return Lean(*(np.append(getattr(self, each.name), getattr(other, each.name)) for each in fields(Lean)))


class Candidates:
    """The candidates of one pipeline degree."""

    def __init__(self, costs: StageCosts, experts: ExpertChoices | None = None) -> None:
        self.costs = costs
        self._experts = experts
        own = experts.strategies if experts else ()
        numbers = {strategy: number for number, strategy in enumerate(costs.strategies)} if own else {}
        self._numbers: Places = np.array([numbers[strategy] for strategy in own], dtype=np.intp)
        """(R,) of the strategies under which experts may have axes of their own."""
        self._alike = self._groups(experts) if experts else self._numbers
        """(R,) strategies with equal numbers give the layer the same layout, and its weights the same split."""
        self._prepared: dict[tuple[int, int], CandidateTables] = {}

    @classmethod
    def of(cls, cost: CostModel, space: Space, pipeline_degree: int) -> Candidates:
        """Those of a space, for a model on its cluster."""
        devices = cost.cluster.devices // pipeline_degree
        every = space.strategies(devices)
        needed = _attended(cost.model, every) or every
        # What none of the model's layers can take would only make tables longer.
        usable = allowed(cost.model, cost.model.kinds, needed, LayerSpec.supports).any(axis=0)
        used = [needed[place] for place in np.nonzero(usable)[0]]
        costs = cost.stage(used or needed, pipeline_degree)
        return cls(costs, ExpertChoices.of(cost, space, costs.strategies, pipeline_degree))

    def _groups(self, experts: ExpertChoices) -> Places:
        layouts = self.costs.layout_of[self._numbers]
        splits = self.costs.split_of[experts.costs.rows][:, self._numbers]
        return np.unique(np.vstack([layouts, splits]), axis=1, return_inverse=True)[1].reshape(-1).astype(np.intp)

    @property
    def size(self) -> int:
        """How many prices a kind of layer has in a combination."""
        return self.least_size + (0 if self._experts is None else len(self._experts.axes_of))

    @property
    def least_size(self) -> int:
        """Those of :meth:`least_tables`."""
        return len(self.costs.strategies) + (0 if self._experts is None else len(self._experts.strategies))

    def strategy(self, columns: Columns, index: int) -> Strategy:
        """The strategy of a column."""
        plain: Strategy = self.costs.strategies[int(columns.strategy[index])]
        choice = int(columns.choice[index])
        if choice < 0 or self._experts is None:
            return plain
        return replace(plain, experts=self._experts.axes[self._experts.axes_of[choice]])

    def is_prepared(self, micro_batch: int, micro_batches: int) -> bool:
        """Whether a combination was priced ahead."""
        return (micro_batch, micro_batches) in self._prepared

    def prepare(self, pairs: Sequence[tuple[int, int]], most: int) -> None:
        """Price the first of some combinations of (samples of a micro-batch, micro-batches); and with it others that
        may soon be asked for, so many in all."""
        if most < 2:
            return
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._prepared][:most]
        tables = self.tables(*(np.array(each) for each in zip(*new, strict=True)))
        self._prepared |= {pair: tables.of(place) for place, pair in enumerate(new)}

    def tables_of(self, micro_batch: int, micro_batches: int) -> CandidateTables:
        """Of one combination."""
        known = self._prepared.pop((micro_batch, micro_batches), None)
        return known or self.tables(np.array([micro_batch]), np.array([micro_batches]))

    def tables(self, micro_batch: Integers, micro_batches: Integers) -> CandidateTables:
        """Of combinations whose micro-batches have so many samples."""
        plain = self.costs.tables(micro_batch, micro_batches)
        if self._experts is None:
            return CandidateTables(plain, None)
        return CandidateTables(plain, self._experts.tables(micro_batch, micro_batches), self._experts.classes)

    def memory_tables(self, micro_batch: Integers, micro_batches: Integers) -> CandidateTables:
        """The same without times, where these take most of the work."""
        if self._experts is not None:
            return self.tables(micro_batch, micro_batches)
        return CandidateTables(self.costs.memory_tables(micro_batch, micro_batches), None)

    def least_tables(self, micro_batch: Integers, micro_batches: Integers) -> CandidateTables:
        """The same where no choice for experts is dearer than it can be at best: few columns, for bounds."""
        plain = self.costs.tables(micro_batch, micro_batches)
        if self._experts is None:
            return CandidateTables(plain, None)
        return CandidateTables(plain, self._experts.least_tables(micro_batch, micro_batches), self._experts.one_class)

    def longest_ns(self, micro_batch: int, micro_batches: int, kinds: Integers) -> int:
        """No stage of these layers takes longer for a micro-batch, whatever is chosen; NEVER: it may take that long."""
        costs, every = self.costs, self.tables(np.array(micro_batch), np.array(micro_batches))
        possible = costs.possible(np.array(micro_batch))
        longest = np.where(possible, every.plain.time_ns, 0).max(axis=-1)
        if every.own is not None and self._experts is not None:
            longest[self._experts.costs.rows] += every.own[1].time_ns.max(axis=-1)
        resplit = max(int(costs.resplit(micro_batch, split).time_ns.max()) for split in range(len(costs.splits)))
        moved = int(costs.change_ns(micro_batch).max()) + 2 * int(costs.transfer_ns(micro_batch).max()) + resplit
        return min(int(longest[kinds].sum()) + len(kinds) * moved, NEVER)

    def prices(self, tables: CandidateTables, held: Integers) -> Prices:
        """Of combinations of which a stage holds so many micro-batches in flight."""
        plain = _Part.of(tables.plain, held)
        if tables.own is None:
            return Prices(plain)
        rest, added = tables.own
        return Prices(plain, (_Part.of(rest, held), _Part.of(added, held)), tables.classes)

    def columns(self, tables: CandidateTables, in_flight: Sequence[int]) -> Columns:
        """Of one combination, those that may be part of an optimum; its stages hold so many micro-batches in flight."""
        plain = _first(tables.plain)
        places = np.arange(len(self.costs.strategies))
        follows = np.full_like(places, -1)
        if tables.own is None or self._experts is None:
            return Columns(plain, places, follows)
        rest, added = map(_first, tables.own)
        held = (min(in_flight), max(in_flight))
        own, choice = self._pairs(self._experts, rest, added, held)
        pairs = _table_by_table(lambda name: getattr(rest, name)[:, own] + getattr(added, name)[:, choice])
        useful = undominated(self._alike[own], _compared(pairs, held), 10)
        useful = useful[(pairs.time_ns[:, useful] < NEVER).any(axis=0)]
        rows = self._experts.costs.rows

        def side_by_side(name: str) -> Integers:
            beside = np.full((len(plain.time_ns), len(useful)), NEVER if name == "time_ns" else 0)
            beside[rows] = np.minimum(getattr(pairs, name)[:, useful], NEVER)
            return np.hstack([getattr(plain, name), beside])

        strategy = np.append(places, self._numbers[own[useful]])
        return Columns(_table_by_table(side_by_side), strategy, np.append(follows, choice[useful]))

    def lean(self, tables: CandidateTables, in_flight: Sequence[int], groups: Integers) -> list[Lean]:
        """Of one combination, by kind of layer: what no other of the same group beats in memory, with its transient and
        without. ``groups``: (T, S) of the strategies."""
        held = (min(in_flight), max(in_flight))
        plain = _first(tables.plain)
        every = [_usable(plain, kind) for kind in range(len(plain.time_ns))]
        if tables.own is not None and self._experts is not None:
            rest, added = map(_first, tables.own)
            for row, kind in enumerate(self._experts.costs.rows.tolist()):
                own = self._lean_pairs(self._experts, (_usable(rest, row), _usable(added, row)), held)
                both = zip(
                    *([getattr(part, each.name) for each in fields(Lean)] for part in (every[kind], own)), strict=True
                )
                every[kind] = Lean(*map(np.concatenate, both))
        return [_leanest(each, groups[kind, each.strategy], held) for kind, each in enumerate(every)]

    def _lean_pairs(self, experts: ExpertChoices, parts: tuple[Lean, Lean], held: tuple[int, int]) -> Lean:
        """Strategies with a choice for their experts; of a class, each with what others of the class do not beat."""
        classes = (experts.class_of, experts.class_of_choice)
        rest, added = (_leanest(part, of[part.strategy], held) for part, of in zip(parts, classes, strict=True))
        own, choice = experts.pairs(rest.strategy, added.strategy)
        first, second = np.searchsorted(rest.strategy, own), np.searchsorted(added.strategy, choice)
        return Lean(
            self._numbers[own],
            rest.state_bytes[first] + added.state_bytes[second],
            rest.activation_bytes[first] + added.activation_bytes[second],
            rest.transient_bytes[first] + added.transient_bytes[second],
        )

    def _pairs(
        self, experts: ExpertChoices, rest: Tables, added: Tables, held: tuple[int, int]
    ) -> tuple[Places, Places]:
        """Strategies that can be run at all, each with the choices of its class that no other beats."""
        possible = np.nonzero((rest.time_ns < NEVER).any(axis=0))[0]
        classes = np.zeros(len(experts.first), dtype=bool)
        classes[experts.class_of[possible]] = True
        choices = np.nonzero(classes[experts.class_of_choice] & (added.time_ns < NEVER).any(axis=0))[0]
        kept = undominated(experts.class_of_choice[choices], _compared(added, held)[:, choices])
        return experts.pairs(possible, choices[kept])


def _usable(tables: Tables, row: int) -> Lean:
    """What a kind of layer can take at all, by its place."""
    places = np.nonzero(tables.time_ns[row] < NEVER)[0]
    sizes = (tables.state_bytes, tables.activation_bytes, tables.transient_bytes)
    return Lean(places, *(np.broadcast_to(size, tables.time_ns.shape)[row, places] for size in sizes))


def _leanest(lean: Lean, groups: Places, held: tuple[int, int]) -> Lean:
    """Without what another of its group beats. What holds for the fewest and the most in flight holds for all."""
    memory = [held_bytes(lean.state_bytes, lean.activation_bytes, count) for count in dict.fromkeys(held)]
    return lean.at(undominated(groups, np.stack([lean.transient_bytes, *memory])))


def _at(tables: Tables, place: int) -> Tables:
    """Of one combination, as a part of all; what all of them share is given once."""

    def taken(name: str) -> Integers:
        table: Integers = getattr(tables, name)
        return table[place : place + 1] if table.ndim > 2 and len(table) > 1 else table

    return _table_by_table(taken)


def _first(tables: Tables) -> Tables:
    """Of the first combination; what all of them share is given once."""

    def taken(name: str) -> Integers:
        table: Integers = getattr(tables, name)
        return table[0] if table.ndim > 2 else table

    return _table_by_table(taken)


def _table_by_table(make: Callable[[str], Integers]) -> Tables:
    return Tables(**{each.name: make(each.name) for each in fields(Tables)})


def _compared(tables: Tables, held: tuple[int, int]) -> Integers:
    """(prices, S): what one column must not have more of than another to beat it; what is not allowed beats nothing.

    Time; and memory, alone and with the transient. A column with less memory may have a larger transient if the sum is
    not larger: in its place a stage's peak is no higher. What holds for the fewest and for the most micro-batches in
    flight holds for all between.
    """
    allowed = tables.time_ns < NEVER
    ways = [tables.time_ns]
    for count in dict.fromkeys(held):
        memory = held_bytes(tables.state_bytes, tables.activation_bytes, count)
        ways += [memory, memory + tables.transient_bytes]
    return np.concatenate([np.where(allowed, way, _FAR) for way in ways])


@dataclass(frozen=True, slots=True)
class _Part:
    """Prices of columns in many combinations, (…, T, S) each."""

    time: Integers
    memory: Integers
    transient: Integers

    @classmethod
    def of(cls, tables: Tables, held: Integers) -> _Part:
        usable = tables.time_ns < NEVER
        memory = held_bytes(tables.state_bytes, tables.activation_bytes, held[:, None, None])
        return cls(tables.time_ns, np.where(usable, memory, NEVER), np.where(usable, tables.transient_bytes, NEVER))


class Prices:
    """Least prices of each kind of layer in many combinations, (…, T) each, whatever it takes."""

    def __init__(self, plain: _Part, own: tuple[_Part, _Part] | None = None, classes: Classes | None = None) -> None:
        self._plain, self._own, self._classes = plain, own, classes
        self.time: Integers = self._least(lambda part: part.time)
        self.memory: Integers = self._least(lambda part: part.memory)
        self.transient: Integers = self._least(lambda part: part.transient)
        plain.memory[...] -= self.memory[..., None]
        if own is not None and classes is not None:
            own[0].memory[...] -= self.memory[..., classes.rows, None]

    def multipliers(self, place: int) -> Floats:
        """At which the least time + λ·memory of the combination at this place changes."""
        plain = self._plain
        known = hull_multipliers(plain.time[place], plain.memory[place])
        if self._own is None or self._classes is None:
            return known
        rest, added = ((part.time[place], part.memory[place]) for part in self._own)
        points = [(plain.time[place][self._classes.rows], plain.memory[place][self._classes.rows])]
        for lam in few(known, _FEW):
            best = _first_least(added[0] + lam * added[1], self._classes)[:, self._classes.class_of]
            together = (one + np.take_along_axis(other, best, axis=1) for one, other in zip(rest, added, strict=True))
            points.append(tuple(together))
        time, memory = (np.hstack(each) for each in zip(*points, strict=True))
        return np.union1d(known, hull_multipliers(np.minimum(time, NEVER), memory))

    def priced(self, lam: float) -> Floats:
        """Least time + λ·memory, of memory what is above the least."""

        def price(part: _Part) -> Floats:
            seconds: Floats = part.time + lam * part.memory
            return seconds

        return self._least(price)

    def _least(self, price: Callable[[_Part], NDArray[Number]]) -> NDArray[Number]:
        """The least of a price that adds up: the experts' choice adds its own to what the rest of the layer costs."""
        least: NDArray[Number] = price(self._plain).min(axis=-1)
        if self._own is not None and self._classes is not None:
            rest, added = self._own
            of_class = np.minimum.reduceat(price(added), self._classes.first, axis=-1)
            together = (price(rest) + of_class[..., self._classes.class_of]).min(axis=-1)
            rows = self._classes.rows
            least[..., rows] = np.minimum(least[..., rows], together)
        return least


def _first_least(priced: Floats, classes: Classes) -> Places:
    """(K, classes) the cheapest choice of each class."""
    least = np.minimum.reduceat(priced, classes.first, axis=-1)
    among = np.where(priced == least[:, classes.class_of_choice], np.arange(priced.shape[1]), priced.shape[1])
    return np.minimum.reduceat(among, classes.first, axis=-1)
