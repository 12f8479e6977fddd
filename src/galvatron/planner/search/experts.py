"""The axes that the experts of a layer may have of their own: which of them are worth pricing.

How the experts of a layer are spread decides nothing but the layer's own time, memory and transient, and their price is
added to that of the layer. It depends on the strategy of the layer only through TP, sequence parallelism, recompute and
whether sequences are divided: strategies that agree in these are a *class*, with the same *choices* for their experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from galvatron.core.spec import Axis, Factors, Kind, LayerSpec, Strategy
from galvatron.planner.cost import CostModel, ExpertCosts, ExpertPairs, Integers, Tables
from galvatron.planner.cost.allowed import allowed
from galvatron.planner.cost.arrays import Places
from galvatron.planner.search.thinning import undominated
from galvatron.planner.space import Space

__all__ = ["Classes", "ExpertChoices"]

Axes = tuple[Axis, ...]
Class = tuple[Factors, bool, bool, bool]
"""TP, sequence parallelism and recompute of a strategy, and whether it has context axes."""
_NONE: Factors = frozenset()


@dataclass(frozen=True, slots=True)
class Classes:
    """Which strategies and choices go together."""

    rows: Places
    """(K,) the kinds of layer that have experts."""
    class_of: Places
    """(R,) of each strategy."""
    first: Places
    """Where the choices of each class begin."""
    class_of_choice: Places
    """(C,)"""


class ExpertChoices:
    """The strategies under which experts may have axes of their own, and their choices, class by class."""

    def __init__(
        self, cost: CostModel, strategies: Sequence[Strategy], axes: Sequence[Axes], pipeline_degree: int
    ) -> None:
        """Each strategy must have choices among the axes."""
        first = {_class(each): each for each in reversed(strategies)}
        useful = _worth_pricing(cost, list(first.values()), axes, pipeline_degree)
        classes = {key: number for number, key in enumerate(first)}
        self.strategies = tuple(strategies)
        """(R,)"""
        self.class_of: Places = np.array([classes[_class(each)] for each in strategies], dtype=np.intp)
        """(R,)"""
        chosen = [useful[key[:2]] for key in classes]
        sizes = [len(each) for each in chosen]
        self.first: Places = np.cumsum([0, *sizes[:-1]], dtype=np.intp)
        """Where the choices of each class begin."""
        self.axes_of: Places = np.concatenate(chosen)
        """(C,) the axes of each choice."""
        self.axes = axes
        of_class = np.repeat(np.arange(len(sizes)), sizes)
        self.costs = ExpertCosts(cost, ExpertPairs(list(first.values()), axes, of_class, self.axes_of), pipeline_degree)
        apart = [replace(each, experts=axes[0]) for each in self.strategies]  # which axes makes no difference
        self._rest, self._rows = cost.rest_of_stage(apart, pipeline_degree)

    @classmethod
    def of(cls, cost: CostModel, space: Space, strategies: Sequence[Strategy], degree: int) -> ExpertChoices | None:
        """Those of a space; None: there are none for this model."""
        devices = cost.cluster.devices // degree
        kinds = [kind for kind in cost.model.kinds if kind.experts is not None]
        if not kinds:
            return None
        alone = [(axes, Strategy(experts=axes)) for axes in space.expert_axes(devices)]
        possible = [(axes, each) for axes, each in alone if any(kind.allows_experts(each) for kind in kinds)]
        tensors = {each.expert_factors(Kind.TP) for _, each in possible}
        takes = allowed(cost.model, kinds, strategies, LayerSpec.supports).any(axis=0)
        taken = [strategies[place] for place in np.nonzero(takes)[0].tolist()]
        usable = [each for each in taken if not each.graded and _tensors(*_class(each)[:2]) & tensors]
        return cls(cost, usable, [axes for axes, _ in possible], degree) if usable else None

    @cached_property
    def class_of_choice(self) -> Places:
        """(C,)"""
        return np.repeat(np.arange(len(self.first)), np.diff(self.first, append=len(self.axes_of)))

    @property
    def classes(self) -> Classes:
        return Classes(self.costs.rows, self.class_of, self.first, self.class_of_choice)

    @property
    def one_class(self) -> Classes:
        """All strategies with one and the same choice."""
        none = np.zeros(1, dtype=np.intp)
        return Classes(self.costs.rows, np.zeros_like(self.class_of), none, none)

    def tables(self, micro_batch: Integers, micro_batches: Integers) -> tuple[Tables, Tables]:
        """Of the kinds that have experts: what layers cost without them, (…, K, R), and what choices add, (…, K, C)."""
        return self._rest_tables(micro_batch, micro_batches), self.costs.tables(micro_batch, micro_batches)

    def least_tables(self, micro_batch: Integers, micro_batches: Integers) -> tuple[Tables, Tables]:
        """The same for a single choice, (…, K, 1), that is no dearer than any: experts take no time, and the states of
        the choice that needs least for them."""
        rest = self._rest_tables(micro_batch, micro_batches)
        nothing = np.zeros((*micro_batch.shape, len(self.costs.rows), 1), dtype=np.int64)
        least = nothing + self.costs.least_state_bytes()[:, None]
        return rest, Tables(
            time_ns=nothing, state_bytes=least, activation_bytes=nothing.copy(), transient_bytes=nothing.copy()
        )

    def _rest_tables(self, micro_batch: Integers, micro_batches: Integers) -> Tables:
        rest = self._rest.rest_tables(micro_batch, micro_batches)
        return Tables(**{each.name: getattr(rest, each.name)[..., self._rows, :] for each in fields(Tables)})

    def pairs(self, strategies: Places, choices: Places) -> tuple[Places, Places]:
        """Each of these strategies with each of these choices that its class has."""
        sizes = np.bincount(self.class_of_choice[choices], minlength=len(self.first))
        begins = np.cumsum(sizes) - sizes
        counts = sizes[self.class_of[strategies]]
        strategy = np.repeat(strategies, counts)
        within = np.arange(len(strategy)) - np.repeat(np.cumsum(counts) - counts, counts)
        return strategy, choices[begins[self.class_of[strategy]] + within]


def _class(strategy: Strategy) -> Class:
    return strategy.factors(Kind.TP), strategy.sequence_parallel, strategy.recompute, strategy.context_degree > 1


def _tensors(tensor: Factors, sequence_parallel: bool) -> set[Factors]:
    """What the experts' TP may be beside the layer's: the same or none; under sequence parallelism none."""
    return {_NONE} if sequence_parallel else {_NONE, tensor}


def _worth_pricing(
    cost: CostModel, strategies: Sequence[Strategy], axes: Sequence[Axes], pipeline_degree: int
) -> dict[tuple[Factors, bool], Places]:
    """By TP and sequence parallelism the axes that no others beat, whatever batch and micro-batches will be."""
    tensors = [Strategy(experts=each).expert_factors(Kind.TP) for each in axes]
    classes = {_class(strategy)[:2]: strategy for strategy in strategies}
    fitting = [[n for n, own in enumerate(tensors) if own in _tensors(*key)] for key in classes]
    sizes = [len(each) for each in fitting]
    axes_of = np.array([number for each in fitting for number in each], dtype=np.intp)
    of_class = np.repeat(np.arange(len(sizes)), sizes)
    pairs = ExpertPairs([replace(each, recompute=False) for each in classes.values()], axes, of_class, axes_of)
    parts = ExpertCosts(cost, pairs, pipeline_degree).parts()
    kept = undominated(of_class, parts)
    return {key: axes_of[kept[of_class[kept] == number]] for number, key in enumerate(classes)}
