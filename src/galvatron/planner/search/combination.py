"""One combination of pipeline degree, batch and micro-batches: bounds on it, then its exact optimum.

Stages are solved once for each signature (their runs of equal layers, what feeds them, how many micro-batches they hold
in flight) and reused wherever the same signature appears.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from galvatron.core.spec import Schedule, Strategy
from galvatron.planner.cost import NEVER, Integers, Pace, Tables, held_bytes, iteration_ns
from galvatron.planner.search.bounds import Floats
from galvatron.planner.search.candidates import Candidates, Columns, Lean
from galvatron.planner.search.cuts import CutMatrix, Cuts, best_cuts, cuts_bound
from galvatron.planner.search.layers import Layers, Signature, Spans
from galvatron.planner.search.least_times import LeastTimes
from galvatron.planner.search.peaks import Sums
from galvatron.planner.search.stage import StageProblem, StageSolution
from galvatron.planner.search.tied import TiedWeights, solve_roughly, solve_tied
from galvatron.planner.search.watch import UNWATCHED

__all__ = ["Candidate", "Combination", "Solved"]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a stage: its optimum, or only that it takes at least so long (inf: nothing fits)."""

    time: float
    solution: StageSolution | None

    @property
    def settled(self) -> bool:
        return self.solution is not None or self.time == np.inf


@dataclass(frozen=True, slots=True)
class Solved:
    """The optimum of a combination."""

    iteration_ns: int
    positions: tuple[int, ...]
    stages: tuple[StageSolution, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What makes a combination."""

    pipeline_degree: int
    batch: int
    micro_batches: int


class Combination:
    """Search over cuts and strategies for one (pipeline degree, batch, micro-batches)."""

    def __init__(
        self,
        layers: Layers,
        candidates: Candidates,
        candidate: Candidate,
        *,
        schedule: Schedule,
        budget: int,
        positions: tuple[int, ...] | None = None,
    ) -> None:
        self.layers, self.candidates, self.costs = layers, candidates, candidates.costs
        self.fixed = positions
        pipeline_degree, batch, micro_batches = candidate.pipeline_degree, candidate.batch, candidate.micro_batches
        self.stages, self.batch, self.micro_batches = pipeline_degree, batch, micro_batches
        self.pace = Pace.of(schedule, pipeline_degree, micro_batches, self.costs.cost.cluster.compute_contention)
        self.budget = budget
        self.micro_batch = batch // micro_batches
        self.in_flight = [schedule.in_flight(p, pipeline_degree, micro_batches) for p in range(pipeline_degree)]
        self._apart = candidates.tables_of(self.micro_batch, micro_batches)
        self.transfer = self.costs.transfer_ns(self.micro_batch)
        self.gradient_transfer = self.costs.gradient_transfer_ns(self.micro_batch)
        self._least = LeastTimes(layers, candidates, self._apart, (self.transfer, self.gradient_transfer), budget)
        self._solved: dict[int, dict[int, _Known]] = {}
        """By the number of a stage and its micro-batches in flight."""
        self._times: dict[int, Floats] = {}
        """By micro-batches in flight what is known of stages, (N,) by their number."""
        self._matrices: dict[int, CutMatrix] = {}
        """The same by end and width."""
        self._solving = False
        """Whether it pays to know which stages do not fit."""
        self._width = min(layers.count - pipeline_degree + 1, 2 * -(-layers.count // pipeline_degree) + 4)
        self.stages_solved = 0
        self.watch = UNWATCHED
        self.found: Solved | None = None
        """The best plan that :meth:`solve` came upon so far."""

    @cached_property
    def columns(self) -> Columns:
        """The candidates; bounds do without."""
        return self.candidates.columns(self._apart, self.in_flight)

    @property
    def tables(self) -> Tables:
        return self.columns.tables

    @cached_property
    def layout_of(self) -> Integers:
        layouts: Integers = self.costs.layout_of[self.columns.strategy]
        return layouts

    @cached_property
    def change(self) -> Integers:
        return self.costs.change_ns(self.micro_batch)

    @cached_property
    def tied(self) -> TiedWeights:
        return TiedWeights(self.costs, self.micro_batch, self.columns.strategy)

    def strategies(self, stage: StageSolution) -> tuple[Strategy, ...]:
        """The strategies of a stage's layers."""
        return tuple(self.candidates.strategy(self.columns, index) for index in stage.choice)

    def memory(self, in_flight_count: int) -> Integers:
        return held_bytes(self.tables.state_bytes, self.tables.activation_bytes, in_flight_count)

    # ------------------------------------------------------------------ bounds

    def bound(self, *, few_counts: bool = False) -> float:
        """A lower bound on the iteration: the best cuts when each stage takes only its Lagrangian bound.

        ``few_counts``: quicker, with at most two different numbers of micro-batches in flight (one if cuts are fixed).
        """
        if self.fixed:
            ends, widths = np.array(self.fixed[1:]), np.diff(self.fixed)
            held = [min(self.in_flight)] * self.stages if few_counts else list(self.in_flight)
            bounds = {count: self._least.times(count, ends, widths) for count in set(held)}
            stages = [bounds[count][p] for p, count in enumerate(held)]
            slowest = max(stages)
            return float(self.pace.whole_ns(sum(stages), slowest)) if np.isfinite(slowest) else np.inf
        counts = self.in_flight
        if len(set(counts)) > 1:
            # Fewer micro-batches in flight are never slower: rounding down to a power of two keeps the bound valid.
            counts = [1 << (count.bit_length() - 1) for count in counts]
        if few_counts:
            most = max(min(counts), max(counts) // 2)
            counts = [most if count >= most else min(counts) for count in counts]
        matrices = [self._matrix(count) for count in counts]
        bound = cuts_bound(matrices, self.pace)
        return min(bound, self._wider_bound())

    def _optimistic(self, cutoff: float) -> Cuts | None:
        """Best cuts over what is known of the stages; widens the longest stage considered until it cannot matter."""
        while True:
            matrices = [self._matrix(count) for count in self.in_flight]
            cuts = best_cuts(matrices, self.pace, cutoff)
            limit = cuts.objective if cuts else cutoff
            if self._wider_bound() >= limit:
                return cuts
            self._width = min(2 * self._width, self.layers.count - self.stages + 1)
            self._times.clear()
            self._matrices.clear()

    def _wider_bound(self) -> float:
        """A bound on iterations in which some stage is longer than any considered so far."""
        if self._width >= self.layers.count - self.stages + 1:
            return np.inf
        least = self._least.times(
            min(self.in_flight), np.arange(self._width + 1, self.layers.count + 1), self._width + 1
        )
        return (self.pace.total + self.pace.slowest) * float(least.min())

    @property
    def _spans(self) -> Spans:
        return self.layers.spans(int(np.diff(self.fixed).max()) if self.fixed else self._width)

    def _matrix(self, in_flight_count: int) -> CutMatrix:
        """Times of stages at least, by end and width."""
        if in_flight_count not in self._matrices:
            self._matrices[in_flight_count] = self._stage_times(in_flight_count)[self._spans.number]
        return self._matrices[in_flight_count]

    def _stage_times(self, in_flight_count: int) -> Floats:
        """(N,) times of stages at least, by their number."""
        if in_flight_count not in self._times:
            times = self._least.times(in_flight_count, self._spans.ends, self._spans.widths)
            if self._solving:
                self._rule_out(times, in_flight_count)
            self._times[in_flight_count] = times
            for number in self._solved:
                self._patch(number, in_flight_count)
        return self._times[in_flight_count]

    def _rule_out(self, times: Floats, in_flight_count: int) -> None:
        """Stages that do not fit, whatever their layers take."""
        sums = Sums.of(self.lean, in_flight_count, self.layers.kinds)
        times[sums.peaks(self._spans.begins, self._spans.ends) > self.budget] = np.inf

    def _rule_out_all(self) -> None:
        self._solving = True
        for count, times in self._times.items():
            self._rule_out(times, count)
        self._matrices.clear()

    # ------------------------------------------------------------------ memory

    @cached_property
    def lean(self) -> list[Lean]:
        """By kind of layer, the candidates that may need least memory.

        What users of a tied weight pay depends on their strategy, and on how the owner splits it: for them candidates
        of one strategy are compared only, for others those that split weights alike.
        """
        costs = self.costs
        groups = np.zeros_like(costs.split_of)
        if costs.tied_places(self.layers.kinds.tolist(), first=True):
            users = np.array([kind.tied_parameters > 0 for kind in costs.cost.model.kinds])
            groups = np.where(users[:, None], np.arange(len(costs.strategies)), costs.split_of)
        return self.candidates.lean(self._apart, self.in_flight, groups)

    # ------------------------------------------------------------------- exact

    def solve(self, cutoff: float) -> Solved | None:
        """The optimum, or None when it is not below the cutoff."""
        if self.fixed:
            self._settle(self.fixed, np.inf)
            return self._solved_plan(self.fixed)
        self._rule_out_all()
        while True:
            self.watch.check()
            cuts = self._optimistic(cutoff)
            if cuts is None:
                return self.found
            self._settle(cuts.positions, cutoff)
            plan = self._solved_plan(cuts.positions)
            if plan is not None and plan.iteration_ns < cutoff:
                self.found, cutoff = plan, plan.iteration_ns

    def solve_roughly(self) -> Solved | None:
        """A plan that fits, found soon; None: none was."""
        self._rule_out_all()
        cuts = Cuts(0.0, self.fixed) if self.fixed else self._optimistic(np.inf)
        if cuts is None:
            return None
        stages = []
        for count, (begin, end) in zip(self.in_flight, pairwise(cuts.positions), strict=True):
            signature = self.layers.signature(begin, end)
            problem = replace(self._problem(signature, count), watch=UNWATCHED)
            sharing = self.costs.tied_places(problem.kinds.tolist(), first=signature[0] < 0)
            solution = solve_roughly(problem, self.budget, self.tied, count, sharing)
            if solution is None:
                return None
            stages.append(solution)
        return Solved(iteration_ns([stage.time for stage in stages], self.pace), cuts.positions, tuple(stages))

    def _settle(self, positions: tuple[int, ...], cutoff: float) -> None:
        """Solve the stages between these positions as far as the cutoff asks.

        A stage is solved only up to the time at which, with the others at what is known of them, the iteration would
        reach the cutoff; when it cannot be faster, that much is noted as a bound.
        """
        numbers = self._spans.numbers(positions)
        for stage, number in enumerate(numbers):
            count = self.in_flight[stage]
            known = self._known(number, count)
            if known is not None and known.settled:
                continue
            limit = cutoff if self.fixed else self._limit(stage, numbers, cutoff)
            if known is None or known.time < limit:
                signature = self.layers.signature(positions[stage], positions[stage + 1])
                self._note(number, signature, count, limit)
            known = self._known(number, count)
            if known is None or not known.settled:
                break  # this cut cannot beat the cutoff

    def _limit(self, stage: int, numbers: list[int], cutoff: float) -> float:
        """The time a stage must stay below for the iteration to stay below the cutoff."""
        if cutoff == np.inf:
            return np.inf
        others = [float(self._stage_times(self.in_flight[p])[number]) for p, number in enumerate(numbers) if p != stage]
        slowest = max(others, default=0.0)
        total, again = self.pace.total, self.pace.slowest
        room = cutoff - total * sum(others)
        as_follower = (room - again * slowest) / total
        return float(as_follower if as_follower <= slowest else room / (total + again))

    def _note(self, number: int, signature: Signature, in_flight_count: int, limit: float) -> None:
        """Solve a stage below the limit and put the result in place of its bounds."""
        whole = NEVER if limit == np.inf else int(np.ceil(limit))
        problem = self._problem(signature, in_flight_count)
        sharing = self.costs.tied_places(problem.kinds.tolist(), first=signature[0] < 0)
        solution = solve_tied(problem, self.budget, min(whole, NEVER), self.tied, in_flight_count, sharing)
        self.stages_solved += 1
        time = float(solution.time) if solution else (np.inf if whole >= NEVER else float(whole))
        self._solved.setdefault(number, {})[in_flight_count] = _Known(time, solution)
        for count in self._times:
            self._patch(number, count)

    def _solved_plan(self, positions: tuple[int, ...]) -> Solved | None:
        stages = []
        for number, count in zip(self._spans.numbers(positions), self.in_flight, strict=True):
            known = self._known(number, count)
            if known is None or known.solution is None:
                return None
            stages.append(known.solution)
        return Solved(iteration_ns([stage.time for stage in stages], self.pace), positions, tuple(stages))

    def _known(self, number: int, in_flight_count: int) -> _Known | None:
        """What is known of a stage that holds this many micro-batches in flight.

        More of them can only make a stage slower: what holds for fewer is a bound, and where fewer and more take equal
        time, so does all between, with the choice for more.
        """
        by_count = self._solved.get(number, {})
        if in_flight_count in by_count and by_count[in_flight_count].settled:
            return by_count[in_flight_count]
        fewer = max((known.time for count, known in by_count.items() if count <= in_flight_count), default=None)
        if fewer is None:
            return None
        if fewer == np.inf:
            return _Known(np.inf, None)
        more = [known for count, known in by_count.items() if count > in_flight_count and known.solution is not None]
        reached = min(more, key=lambda known: known.time, default=None)
        return reached if reached is not None and reached.time == fewer else _Known(fewer, None)

    def _problem(self, signature: Signature, in_flight_count: int) -> StageProblem:
        before, runs, last = signature
        kinds = np.concatenate([np.full(length, kind) for kind, length in runs])
        nothing = np.zeros_like(self.transfer[0])
        return StageProblem(
            kinds=kinds,
            time=self.tables.time_ns,
            memory=self.memory(in_flight_count),
            transient=self.tables.transient_bytes,
            layout_of=self.layout_of,
            change=self.change,
            entry=nothing if before < 0 else self.transfer[before],
            exit=nothing if last else self.gradient_transfer[runs[-1][0]],
            watch=self.watch,
        )

    def _patch(self, number: int, in_flight_count: int) -> None:
        """Put what is known of a stage in place of its bound."""
        known, times = self._known(number, in_flight_count), self._times[in_flight_count]
        if known is None or number >= len(times):
            return
        time = known.time if known.settled else max(known.time, float(times[number]))
        if times[number] != time:
            times[number] = time
            self._matrices.pop(in_flight_count, None)
