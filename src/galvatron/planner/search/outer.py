"""The whole search: batch, pipeline degree, micro-batches, cuts and strategies together, with a proof.

Paper Algorithm 1 loops over batch sizes and pipeline degrees and solves each; here every combination gets a cheap upper
bound on its throughput, the most promising is refined first, and the search stops when no bound left is above the best
plan found. That stop is the certificate: gap 0.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Strategy
from galvatron.planner.cost import NEVER, Integers, Pace
from galvatron.planner.search.bounds import Floats, few
from galvatron.planner.search.candidates import Candidates, CandidateTables, Prices
from galvatron.planner.search.combination import Candidate, Combination, Solved
from galvatron.planner.search.cuts import CutRule, balanced_cuts
from galvatron.planner.search.layers import Layers
from galvatron.planner.search.problem import Problem
from galvatron.planner.search.watch import OutOfTime
from galvatron.planner.space import divisors

__all__ = ["Optimum", "Proof", "Search", "search"]

_CHUNK = 1_000_000
"""Table entries priced at once when combinations are bounded."""


class _Known(IntEnum):
    """What a combination in the queue is bounded by."""

    LEAST_PRICES = 0
    """Experts as if they had the best of every choice. Stands for a chunk, of which it is the best."""
    PRICES = 1
    SOME_CUTS = 2
    CUTS = 3


_Queued = tuple[float, int, int, int, _Known]
"""Minus the throughput at best, in samples a nanosecond; batch, pipeline degree, micro-batches."""
_Best = tuple[int, int, Solved, Combination]
"""Batch, nanoseconds of an iteration, and the plan of which combination."""
_Item = TypeVar("_Item")
_AHEAD, _SMALL = 16, 50_000
"""Combinations priced ahead, and entries of their tables: for small tables numpy takes as long as for one of them."""
_TablesOf = Callable[[Integers, Integers], CandidateTables]
_MULTIPLIERS = 12
"""So many at most in the first bounds, which all combinations get."""
_TIGHT = 6
"""A budget is tight below so many times what devices hold at least: most combinations then do not fit, which their
memory shows for less work than their prices."""
_ROUGHLY = 8
"""Combinations tried for a rough plan."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Why nothing in the space is better."""

    combinations: int
    """Combinations of batch, pipeline degree and micro-batches in the space."""
    opened: int
    """Combinations whose cuts were looked at; the others were excluded by their first bound."""
    solved: int
    """Combinations solved exactly."""
    stages_solved: int
    rest_bound: float
    """Highest throughput, in samples a nanosecond, that a combination not solved could have. Above that of the plan
    only where the search was stopped."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan in the space; of a search that was stopped the best one found."""

    batch: int
    pipeline_degree: int
    micro_batches: int
    solved: Solved
    combination: Combination
    proof: Proof

    @property
    def strategies(self) -> tuple[tuple[Strategy, ...], ...]:
        """Strategy of each layer, by stage."""
        return tuple(self.combination.strategies(stage) for stage in self.solved.stages)


def search(problem: Problem) -> Optimum | None:
    """The plan with the highest throughput, or None when nothing fits.

    Of plans that tie exactly the first met is kept; nothing in the search is random, so it is always the same one.
    """
    return Search(problem).run()


class Search:
    """One search, and what its combinations are."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        model, cluster = problem.cost.model, problem.cost.cluster
        index = {kind.name: i for i, kind in enumerate(model.kinds)}
        self.layers = Layers(np.array([index[layer.name] for layer in model.layers]), len(model.kinds))
        self.degrees = tuple(d for d in problem.space.pipeline_degrees(cluster.devices) if d <= len(model.layers))
        """Of the pipeline."""
        self._candidates: dict[int, Candidates] = {}
        self._balanced: dict[tuple[float, ...], tuple[int, ...]] = {}

    def candidates_of(self, degree: int) -> Candidates:
        """What layers may take in the stages of a pipeline degree."""
        if degree not in self._candidates:
            self._candidates[degree] = Candidates.of(self.problem.cost, self.problem.space, degree)
        return self._candidates[degree]

    def _positions(self, degree: int, batch: int) -> tuple[int, ...] | None:
        """Cut positions by one of the paper's guidelines, or None where cuts are searched.

        Only the repeated layers are balanced; embeddings, heads and other single layers go where they stand (unless no
        layer is repeated: then all count).
        """
        rule = self.problem.cuts
        if rule is CutRule.EXACT:
            return None
        cost, costs = self.problem.cost, self.candidates_of(degree).costs
        kinds = cost.model.kinds
        if rule is CutRule.LAYERS:
            weights = np.ones(len(kinds))
        elif rule is CutRule.PARAMETERS:
            weights = np.array([kind.parameters for kind in kinds], dtype=np.float64)
        elif rule is CutRule.MEMORY:
            samples = batch / costs.devices
            each = cost.optimizer.bytes_per_parameter
            weights = np.array([each * kind.parameters + samples * kind.activation_bytes for kind in kinds])
        else:
            weights = cost.forward_s()
        repeated = self.layers.total > 1
        weights = np.where(repeated, weights, 0.0) if repeated.any() else weights
        key = (float(degree), *(weights / max(weights.max(), 1e-300)).tolist())
        if key not in self._balanced:
            self._balanced[key] = balanced_cuts(weights[self.layers.kinds], degree)
        return self._balanced[key]

    def run(self) -> Optimum | None:
        """Combinations in the order of their throughput at best. The first one is bounded more tightly and queued
        again; when its bound is as tight as can be, it is solved."""
        if self.problem.floor > self.problem.budget:
            return None
        queue, waiting = self._queue()
        total = sum(count for _, count in waiting.values())
        opened: dict[tuple[int, int, int], Combination] = {}
        best: _Best | None = None
        solved_count, rest_bound = 0, 0.0
        while queue:
            rank, batch, degree, micro_batches, known = heapq.heappop(queue)
            if best is not None and -rank * best[1] <= best[0]:
                rest_bound = -rank
                break
            key = (batch, degree, micro_batches)
            self.problem.watch.reached(None if best is None else -rank * best[1] / best[0] - 1)
            try:
                self.problem.watch.check()
                solved = opened[key].solve(_cutoff(batch, best)) if known is _Known.CUTS else None
            except OutOfTime:
                rest_bound = -rank  # of all that is left, this had the highest bound
                if known is _Known.CUTS:
                    best = _better(best, opened[key], opened[key].found)
                best = best or self._roughly([(rank, *key, known), *queue])
                break
            if known is _Known.LEAST_PRICES:
                for queued in self._next_chunk(degree, waiting[degree][0]):
                    heapq.heappush(queue, queued)
            elif known is not _Known.CUTS:
                if key not in opened:
                    self._prepare(key, queue)
                    opened[key] = self.combination(*key)
                few = known is _Known.PRICES
                bound = opened[key].bound(few_counts=few)
                if np.isfinite(bound):
                    after = _Known.SOME_CUTS if few else _Known.CUTS
                    heapq.heappush(queue, (max(rank, -batch / bound), *key, after))
            else:
                solved_count += 1
                best = _better(best, opened[key], solved)
        if best is None:
            return None
        batch, _, solved, combination = best
        rest_bound = max(rest_bound, self._beyond(batch / solved.iteration_ns))
        proof = Proof(total, len(opened), solved_count, sum(c.stages_solved for c in opened.values()), rest_bound)
        return Optimum(batch, combination.stages, combination.micro_batches, solved, combination, proof)

    def _prepare(self, key: tuple[int, int, int], queue: list[_Queued]) -> None:
        """Price a combination, and with it those of the queue that come next, as far as tables stay small."""
        batch, degree, micro_batches = key
        candidates = self.candidates_of(degree)
        if candidates.is_prepared(batch // micro_batches, micro_batches):
            return
        most = min(_AHEAD, _SMALL // (candidates.size * len(self.layers.total)))
        following = heapq.nsmallest(2 * most, queue) if most > 1 else []
        pairs = [(b // m, m) for _, b, stages, m, known in following if stages == degree and known is _Known.PRICES]
        candidates.prepare([(batch // micro_batches, micro_batches), *pairs], most)

    def _roughly(self, queue: list[_Queued]) -> _Best:
        """A plan that fits, of the most promising combinations, where the time was up before there was any."""
        for _, batch, degree, micro_batches, _ in heapq.nsmallest(_ROUGHLY, queue):
            combination = self.combination(batch, degree, micro_batches)
            found = _better(None, combination, combination.solve_roughly())
            if found is not None:
                return found
        raise InvalidInput("time-limit: no plan was found in that time; give more seconds, or leave it out")

    def _beyond(self, throughput: float) -> float:
        """The highest throughput of plans that the search cannot tell from what cannot be done, if it is above this.

        They have a stage that takes NEVER or longer for a micro-batch, which bounds their iterations from below. A
        combination has none of them where the dearest of everything makes less.
        """
        if max(self.problem.batches) <= throughput * NEVER:  # no plan that is faster has such a stage
            return 0.0
        beyond = throughput
        contention = self.problem.cost.cluster.compute_contention
        for degree in self.degrees:
            for batch, count in ((b, m) for b in self.problem.batches for m in self.micro_batch_counts(b, degree)):
                pace = Pace.of(self.problem.schedule, degree, count, contention)
                at_best = batch / pace.whole_ns(NEVER, NEVER)
                if at_best <= beyond:
                    continue
                if self.candidates_of(degree).longest_ns(batch // count, count, self.layers.kinds) >= NEVER:
                    beyond = at_best
        return beyond

    def _queue(self) -> tuple[list[_Queued], dict[int, tuple[deque[list[_Queued]], int]]]:
        """The queue to begin with; and of each pipeline degree what waits behind its first, in chunks that are bounded
        together, and how many combinations it has."""
        queue: list[_Queued] = []
        waiting = {}
        for degree in self.degrees:
            candidates = self.candidates_of(degree)
            ranked = sorted(self._bounded(degree, self._undominated(degree), _Known.LEAST_PRICES))
            if candidates.least_size < candidates.size:
                chunks = deque(map(list, self._chunks(ranked, candidates.size)))
                queue += [chunk[0] for chunk in list(chunks)[:1]]
            else:
                chunks = deque()
                queue += [(*queued[:4], _Known.PRICES) for queued in ranked]
            waiting[degree] = (chunks, len(ranked))
        heapq.heapify(queue)
        return queue, waiting

    def _next_chunk(self, degree: int, waiting: deque[list[_Queued]]) -> Iterator[_Queued]:
        """The next combinations of a pipeline degree, bounded by all prices; and the first of those behind them."""
        chunk = waiting.popleft()
        ranks = {(batch, micro_batches): rank for rank, batch, _, micro_batches, _ in chunk}
        for rank, batch, _, micro_batches, known in self._bounded(degree, sorted(ranks), _Known.PRICES):
            yield max(rank, ranks[batch, micro_batches]), batch, degree, micro_batches, known
        if waiting:
            yield waiting[0][0]

    def combination(self, batch: int, degree: int, micro_batches: int) -> Combination:
        made = Combination(
            self.layers,
            self.candidates_of(degree),
            Candidate(degree, batch, micro_batches),
            schedule=self.problem.schedule,
            budget=self.problem.budget,
            positions=self._positions(degree, batch),
        )
        made.watch = self.problem.watch
        return made

    def micro_batch_counts(self, batch: int, degree: int) -> list[int]:
        """Counts that divide the batch and that the schedule can run."""
        most, largest = self.problem.most_micro_batches(degree) or batch, self.problem.max_micro_batch or batch
        if degree == 1 and not self.problem.space.switches.accumulation:
            return [1] if batch <= largest else []
        counts = [count for count in divisors(batch) if count <= most and batch // count <= largest]
        return [count for count in counts if self.problem.schedule.runs(degree, count)]

    def _undominated(self, degree: int) -> list[tuple[int, int]]:
        """Pairs (batch, micro-batches) worth a look.

        With the size of a micro-batch fixed, more of them spread the filling of the pipeline and the work done once an
        iteration over more samples. Of those that hold equally many in flight in every stage (under GPipe none do) the
        most micro-batches therefore win, and only the largest batch is kept; and that of a single one, which needs less
        memory.
        """
        pairs = [(b, m) for b in self.problem.batches for m in self.micro_batch_counts(b, degree)]
        cuts_move = self.problem.cuts is CutRule.MEMORY  # with the batch
        if degree > 1 and cuts_move:
            return pairs
        in_flight = self.problem.schedule.in_flight
        counts = {count for _, count in pairs}
        held = {count: tuple(in_flight(p, degree, count) for p in range(degree)) for count in counts}
        most = {(batch // count, count == 1, held[count]): (batch, count) for batch, count in sorted(pairs)}
        return sorted(most.values(), key=lambda pair: (pair[0] // pair[1], pair))  # equal sizes are priced together

    def _bounded(self, degree: int, pairs: Sequence[tuple[int, int]], known: _Known) -> Iterator[_Queued]:
        """Those of these pairs (batch, micro-batches) that may fit, with a bound on their throughput."""
        candidates = self.candidates_of(degree)
        least = known is _Known.LEAST_PRICES
        if least and self.problem.budget < _TIGHT * self.problem.floor and candidates.least_size == candidates.size:
            needed = self.memory_bounds(degree, pairs)
            pairs = [pair for pair, bytes_ in zip(pairs, needed, strict=True) if bytes_ <= self.problem.budget]
        for chunk in self._chunks(pairs, candidates.least_size if least else candidates.size):
            bounds = self._bounds_of(degree, chunk, least=least)
            for (batch, micro_batches), bound in zip(chunk, bounds.tolist(), strict=True):
                if np.isfinite(bound):
                    yield -batch / bound, batch, degree, micro_batches, known

    def _chunks(self, items: Sequence[_Item], prices: int) -> Iterator[Sequence[_Item]]:
        """As many at once as tables may have entries."""
        size = max(1, _CHUNK // (prices * len(self.layers.total)))
        for start in range(0, len(items), size):
            yield items[start : start + size]

    def memory_bounds(self, degree: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Lower bounds on the memory of the fullest stage, of pairs (batch, micro-batches); NEVER: nothing is allowed.

        The fullest stage needs at least the mean, and at least what the largest single layer needs.
        """
        bounds: list[int] = []
        for chunk in self._chunks(pairs, self.candidates_of(degree).size):
            prices = self._prices(degree, chunk, self.candidates_of(degree).memory_tables)
            memory, transient = prices.memory, prices.transient
            together = memory @ self.layers.total + transient.max(axis=1) + (degree - 1) * transient.min(axis=1)
            needed = np.maximum(-(-together // degree), (memory + transient).max(axis=1))
            bounds += np.minimum(needed, NEVER).tolist()
        return bounds

    def _prices(self, degree: int, pairs: Sequence[tuple[int, int]], tables: _TablesOf) -> Prices:
        """With as few micro-batches in flight as the last stage holds: no other holds fewer."""
        batches = np.array([b for b, _ in pairs])
        micro_batches = np.array([m for _, m in pairs])
        held = np.array([self.problem.schedule.in_flight(degree - 1, degree, m) for _, m in pairs])
        return self.candidates_of(degree).prices(tables(batches // micro_batches, micro_batches), held)

    def _bounds_of(self, degree: int, pairs: Sequence[tuple[int, int]], *, least: bool) -> Floats:
        """Lower bounds in nanoseconds on the iterations of many combinations of one pipeline degree at once.

        All stages together have degree times the budget, and pass data on where that takes least time. The slowest
        takes at least the mean; and at least what layers of a kind take of which some stage has so many, because there
        are not more stages.
        """
        candidates = self.candidates_of(degree)
        prices = self._prices(degree, pairs, candidates.least_tables if least else candidates.tables)
        transient, counts = prices.transient, self.layers.total
        room = degree * self.problem.budget - transient.max(axis=1) - (degree - 1) * transient.min(axis=1)
        room = room - prices.memory @ counts  # prices apply to what is above the least, to keep them accurate
        together = -(-counts // degree)
        room_together = self.problem.budget - transient - prices.memory * together
        lams = few(prices.multipliers(len(pairs) // 2), _MULTIPLIERS)
        total = np.full(len(pairs), -np.inf)
        slowest = prices.time.max(axis=1).astype(np.float64)
        for lam in lams:
            priced = prices.priced(lam)
            total = np.maximum(total, priced @ counts - lam * room)
            slowest = np.maximum(slowest, (priced * together - lam * room_together).max(axis=1))
        if degree > 1:
            total = total + self._least_transfers(degree, pairs)
        contention = self.problem.cost.cluster.compute_contention
        paces = [Pace.of(self.problem.schedule, degree, count, contention) for _, count in pairs]
        again = np.array([pace.slowest for pace in paces]) * np.maximum(total / degree, slowest)
        bounds = np.array([pace.total for pace in paces]) * total + again
        possible = (room >= 0) & (room_together >= 0).all(axis=1) & (slowest < NEVER)
        return np.where(possible, bounds, np.inf)

    def _least_transfers(self, degree: int, pairs: Sequence[tuple[int, int]]) -> Integers:
        """Between all stages, there and back, where the layers are cut so that it takes least time."""
        costs = self.candidates_of(degree).costs
        sizes = np.array([batch // count for batch, count in pairs])[:, None, None]
        each = costs.transfer_ns(sizes).min(axis=-1) + costs.gradient_transfer_ns(sizes).min(axis=-1)
        places = np.bincount(self.layers.kinds[:-1], minlength=each.shape[1])
        order = np.argsort(each, axis=1)
        offered = places[order]
        cuts = np.clip(degree - 1 - (offered.cumsum(axis=1) - offered), 0, offered)
        least: Integers = (np.take_along_axis(each, order, 1) * cuts).sum(axis=1)
        return least


def _cutoff(batch: int, best: _Best | None) -> float:
    """What an iteration with this batch must stay below to beat the best plan."""
    return np.inf if best is None else -(-batch * best[1] // best[0])


def _better(best: _Best | None, combination: Combination, solved: Solved | None) -> _Best | None:
    """The best plan so far, or that of this combination if it is better."""
    if solved is None or solved.iteration_ns >= _cutoff(combination.batch, best):
        return best
    return combination.batch, solved.iteration_ns, solved, combination
