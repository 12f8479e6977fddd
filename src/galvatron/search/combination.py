"""One combination of pipeline degree, batch and micro-batches: bounds on it, then its exact optimum.

Stages are solved once for each signature (their runs of equal layers, what feeds them, how many micro-batches they hold
in flight) and reused wherever the same signature appears.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from galvatron.cost import NEVER, Integers, Schedule, StageCosts, in_flight, iteration_ns
from galvatron.search.bounds import hull_multipliers, priced_minima
from galvatron.search.cuts import CutMatrix, Cuts, best_cuts
from galvatron.search.stage import StageProblem, StageSolution, solve_stage

__all__ = ["Combination", "Layers", "Solved"]

Signature = tuple[int, tuple[tuple[int, int], ...], bool]
"""(kind of the layer before the stage or -1, runs of (kind, length), whether the stage is the last)."""


class Layers:
    """The model's layers as kind indices, with the counts that bounds need."""

    def __init__(self, kinds: Integers, kind_count: int) -> None:
        self.kinds = kinds
        self.count = len(kinds)
        one_hot = np.zeros((kind_count, self.count + 1), dtype=np.int64)
        one_hot[kinds, np.arange(1, self.count + 1)] = 1
        self.counts_before: Integers = np.cumsum(one_hot, axis=1)
        """(T, L+1): layers of each kind before a position."""
        self.total: Integers = self.counts_before[:, -1]
        changes = np.append(True, kinds[1:] != kinds[:-1])
        self.run_begin: Integers = np.maximum.accumulate(np.where(changes, np.arange(self.count), 0))
        """(L,) first layer of the run of equal layers that a layer is in."""

    def signature(self, begin: int, end: int) -> Signature:
        runs = tuple((int(kind), len(list(group))) for kind, group in groupby(self.kinds[begin:end].tolist()))
        return int(self.kinds[begin - 1]) if begin else -1, runs, end == self.count


@dataclass(frozen=True, slots=True)
class Solved:
    """The optimum of a combination."""

    iteration_ns: int
    positions: tuple[int, ...]
    stages: tuple[StageSolution, ...]


class Combination:
    """Search over cuts and strategies for one (pipeline degree, batch, micro-batches)."""

    def __init__(
        self,
        layers: Layers,
        costs: StageCosts,
        *,
        pipeline_degree: int,
        batch: int,
        micro_batches: int,
        schedule: Schedule,
        budget: int,
        positions: tuple[int, ...] | None = None,
    ) -> None:
        self.layers, self.costs = layers, costs
        self.fixed = positions
        self.stages, self.batch, self.micro_batches = pipeline_degree, batch, micro_batches
        self.budget = budget
        self.micro_batch = batch // micro_batches
        self.in_flight = [in_flight(p, pipeline_degree, micro_batches, schedule) for p in range(pipeline_degree)]
        self.tables = costs.tables(np.array(self.micro_batch), np.array(micro_batches))
        self.change = costs.change_ns(self.micro_batch)
        self.transfer = costs.transfer_ns(self.micro_batch)
        self._solved: dict[Signature, dict[int, StageSolution | None]] = {}
        self._matrices: dict[int, CutMatrix] = {}
        self._width = min(layers.count - pipeline_degree + 1, 4 * -(-layers.count // pipeline_degree) + 4)
        self.stages_solved = 0

    def memory(self, in_flight_count: int) -> Integers:
        memory: Integers = self.tables.state_bytes + in_flight_count * self.tables.activation_bytes
        return memory

    # ------------------------------------------------------------------ bounds

    def bound(self, cutoff: float) -> float:
        """A lower bound on the iteration: the best cuts when each stage takes only its Lagrangian bound."""
        if self.fixed:
            ends, widths = np.array(self.fixed[1:]), np.diff(self.fixed)
            stages = [self._bounds(count, ends, widths)[p] for p, count in enumerate(self.in_flight)]
            return float(sum(stages) + (self.micro_batches - 1) * max(stages))
        cuts = self._optimistic(cutoff)
        return cuts.objective if cuts else np.inf

    def _optimistic(self, cutoff: float) -> Cuts | None:
        """Best cuts over what is known of the stages; widens the longest stage considered until it cannot matter."""
        while True:
            matrices = [self._matrix(count) for count in self.in_flight]
            cuts = best_cuts(matrices, self.micro_batches, cutoff)
            limit = cuts.objective if cuts else cutoff
            if self._width >= self.layers.count - self.stages + 1 or self._wider_bound() >= limit:
                return cuts
            self._width = min(2 * self._width, self.layers.count - self.stages + 1)
            self._matrices.clear()

    def _wider_bound(self) -> float:
        """A bound on iterations in which some stage is longer than any considered so far."""
        least = self._bounds(min(self.in_flight), np.arange(self._width + 1, self.layers.count + 1), self._width + 1)
        return self.micro_batches * float(least.min())

    def _matrix(self, in_flight_count: int) -> CutMatrix:
        if in_flight_count not in self._matrices:
            ends = np.arange(self.layers.count + 1)[:, None]
            widths = np.arange(self._width + 1)[None, :]
            matrix = self._bounds(in_flight_count, ends, widths)
            for signature, by_count in self._solved.items():
                self._patch(matrix, signature, by_count, in_flight_count)
            self._matrices[in_flight_count] = matrix
        return self._matrices[in_flight_count]

    def _bounds(self, in_flight_count: int, ends: NDArray[np.int64], widths: NDArray[np.int64] | int) -> CutMatrix:
        """Lagrangian bounds of stages given by end and width."""
        begins = ends - widths
        held = self.layers.counts_before[:, ends] - self.layers.counts_before[:, np.maximum(begins, 0)]
        usable = self.tables.time_ns < NEVER
        memory = self.memory(in_flight_count)
        lams = hull_multipliers(self.tables.time_ns, memory)
        least = priced_minima(self.tables.time_ns, np.where(usable, memory, NEVER), lams)
        transient = np.where(usable, self.tables.transient_bytes, NEVER).min(axis=1)
        largest = np.where(held > 0, transient.reshape(-1, *[1] * ends.ndim), 0).max(axis=0)
        shape = held.shape[1:]
        room = self.budget - largest
        priced = (least @ held.reshape(len(transient), -1)).reshape(len(lams), *shape)
        bounds = (priced - lams.reshape(-1, *[1] * len(shape)) * room).max(axis=0)
        least_memory = np.where(usable, memory, NEVER).min(axis=1)
        too_large = np.tensordot(least_memory, held, axes=1) > room
        impossible = too_large | (begins < 0) | (begins == ends) | (bounds >= NEVER)
        return np.where(impossible, np.inf, np.ceil(bounds - 1e-3))

    # ------------------------------------------------------------------- exact

    def solve(self, cutoff: float) -> Solved | None:
        """The optimum, or None when it is not below the cutoff."""
        if self.fixed:
            self._settle(self.fixed)
            return self._solved_plan(self.fixed)
        while True:
            cuts = self._optimistic(cutoff)
            if cuts is None:
                return None
            if self._settle(cuts.positions):
                return self._solved_plan(cuts.positions)

    def _settle(self, positions: tuple[int, ...]) -> bool:
        """Solve the stages between these positions; True when all were known already."""
        settled = True
        for stage, (begin, end) in enumerate(zip(positions, positions[1:], strict=False)):
            signature, count = self.layers.signature(begin, end), self.in_flight[stage]
            if self._known(signature, count) is None:
                settled = False
                solution = solve_stage(self._problem(signature, count), self.budget)
                self.stages_solved += 1
                self._solved.setdefault(signature, {})[count] = solution
                for other, matrix in self._matrices.items():
                    self._patch(matrix, signature, self._solved[signature], other)
        return settled

    def _solved_plan(self, positions: tuple[int, ...]) -> Solved | None:
        stages = []
        for stage, (begin, end) in enumerate(zip(positions, positions[1:], strict=False)):
            known = self._known(self.layers.signature(begin, end), self.in_flight[stage])
            if known is None or known[0] is None:
                return None
            stages.append(known[0])
        return Solved(iteration_ns([stage.time for stage in stages], self.micro_batches), positions, tuple(stages))

    def _known(self, signature: Signature, in_flight_count: int) -> tuple[StageSolution | None] | None:
        """The solution of a stage if it is known, in a tuple because it may be that there is none.

        More micro-batches in flight can only make a stage slower, so equal times at a lower and a higher count hold for
        all counts between, and the choice for the higher count fits them all.
        """
        by_count = self._solved.get(signature, {})
        if in_flight_count in by_count:
            return (by_count[in_flight_count],)
        higher = [count for count in by_count if count > in_flight_count]
        lower = [count for count in by_count if count < in_flight_count]
        if higher and lower:
            above, below = by_count[min(higher)], by_count[max(lower)]
            if above is not None and below is not None and above.time == below.time:
                return (above,)
        if lower and by_count[max(lower)] is None:
            return (None,)
        return None

    def _problem(self, signature: Signature, in_flight_count: int) -> StageProblem:
        before, runs, last = signature
        kinds = np.concatenate([np.full(length, kind) for kind, length in runs])
        nothing = np.zeros_like(self.transfer[0])
        return StageProblem(
            kinds=kinds,
            time=self.tables.time_ns,
            memory=self.memory(in_flight_count),
            transient=self.tables.transient_bytes,
            layout_of=self.costs.layout_of,
            change=self.change,
            entry=nothing if before < 0 else self.transfer[before],
            exit=nothing if last else self.transfer[runs[-1][0]],
        )

    def _patch(
        self,
        matrix: CutMatrix,
        signature: Signature,
        by_count: dict[int, StageSolution | None],
        in_flight_count: int,
    ) -> None:
        """Put what is known of a signature in place of its bounds, wherever it appears."""
        known = self._known(signature, in_flight_count)
        if known is not None:
            value = float(known[0].time) if known[0] else np.inf
        else:
            below = [count for count in by_count if count < in_flight_count]
            solution = by_count[max(below)] if below else None
            if solution is None:
                return
            value = float(solution.time)  # still a bound: fewer in flight are never slower
        _, runs, _ = signature
        width = sum(length for _, length in runs)
        if width >= matrix.shape[1]:
            return
        for end in range(width, self.layers.count + 1):
            if self._appears(signature, end - width, end):
                matrix[end, width] = max(value, matrix[end, width]) if known is None else value

    def _appears(self, signature: Signature, begin: int, end: int) -> bool:
        before, runs, last = signature
        kinds = self.layers.kinds
        if last != (end == self.layers.count) or before != (int(kinds[begin - 1]) if begin else -1):
            return False
        if len(runs) == 1:
            return bool(kinds[begin] == runs[0][0] and self.layers.run_begin[end - 1] <= begin)
        return self.layers.signature(begin, end) == signature
