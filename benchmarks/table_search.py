"""The paper's own search, as a yardstick: Algorithm 1 around the table of Equation 1.

C(L, E) is filled layer by layer over memory in steps of a quantum, with one row a strategy of the last layer, because R
depends on two neighbouring strategies: O(layers × memory × strategies²) for each stage. Memory is rounded up to the
quantum, so what the table finds always fits; with a quantum of one byte on small whole numbers it is exact, and tests
use it as an oracle. It shares with the search nothing but its input tables.

    plan = table_search(problem, quantum=64 * 2**20)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import GPIPE, ONE_F_ONE_B
from galvatron.planner.cost import NEVER, Integers, StageCosts
from galvatron.planner.search import Problem, StageProblem, StageSolution

__all__ = ["TablePlan", "all_cuts", "even_cuts", "solve_combination", "solve_stage_by_table", "table_search"]

Positions = tuple[int, ...]
"""Stage p holds the layers from positions[p] to positions[p + 1]."""
CutFunction = Callable[[int, int], Iterable[Positions]]
"""From the number of layers and of stages to the cuts to try."""

_FAR = 1 << 60
"""Time of what does not fit; far above NEVER, and two of them still fit an int64."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The best plan the table found."""

    batch: int
    pipeline_degree: int
    micro_batches: int
    iteration_ns: int
    positions: Positions
    stages: tuple[StageSolution, ...]


def even_cuts(layers: int, stages: int) -> Iterable[Positions]:
    """Algorithm 1, line 6: the model is evenly partitioned."""
    yield tuple(stage * layers // stages for stage in range(stages + 1))


def all_cuts(layers: int, stages: int) -> Iterable[Positions]:
    """Every way to cut, for small models."""
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


# ------------------------------------------------------------------------------------------------------ one stage


def solve_stage_by_table(
    problem: StageProblem, budget: int, quantum: int = 1, *, each_transient: bool = True
) -> StageSolution | None:
    """Equation 1 for one stage.

    The peak is Σ memory + the largest transient θ. Each θ that occurs gets a table of its own (strategies that need
    more are forbidden, the budget is smaller by θ); otherwise one table sets the largest θ of all strategies aside,
    which is faster and may miss the optimum.
    """
    usable = problem.time[problem.kinds] < NEVER
    thetas = np.unique(problem.transient[problem.kinds][usable]).tolist()
    best: StageSolution | None = None
    for theta in thetas if each_transient else thetas[-1:]:
        if theta <= budget:
            found = _fill_table(problem, theta, (budget - theta) // quantum, quantum)
            if found is not None and (best is None or found.time < best.time):
                best = found
    return best


def _fill_table(problem: StageProblem, theta: int, capacity: int, quantum: int) -> StageSolution | None:
    """One table without transients: ``cost[s, e]`` is the least time of the layers so far in at most e quanta of
    memory, the last of them under strategy s."""
    strategies = problem.time.shape[1]
    layout = problem.layout_of
    cost = np.zeros((0, 0), dtype=np.int64)
    previous: list[NDArray[np.int16]] = []
    for layer, kind in enumerate(problem.kinds.tolist()):
        after = np.full((strategies, capacity + 1), _FAR, dtype=np.int64)
        best_previous = np.zeros((strategies, capacity + 1), dtype=np.int16)
        for s in range(strategies):
            units = -(-int(problem.memory[kind, s]) // quantum)
            if problem.time[kind, s] >= NEVER or problem.transient[kind, s] > theta or units > capacity:
                continue
            if layer == 0:
                after[s, units:] = problem.entry[layout[s]] + problem.time[kind, s]
            else:
                change = problem.change[problem.kinds[layer - 1], layout, layout[s]]
                arriving = cost[:, : capacity + 1 - units] + change[:, None]
                best_previous[s, units:] = arriving.argmin(axis=0)
                after[s, units:] = arriving.min(axis=0) + problem.time[kind, s]
        cost = np.minimum(after, _FAR)
        previous.append(best_previous)
    total = cost[:, capacity] + problem.exit[layout]
    choice = [int(total.argmin())]
    if total[choice[0]] >= NEVER:
        return None
    left = capacity
    for layer in range(len(previous) - 1, 0, -1):
        s = choice[-1]
        choice.append(int(previous[layer][s, left]))
        left -= -(-int(problem.memory[problem.kinds[layer], s]) // quantum)
    return StageSolution(int(total[choice[0]]), tuple(reversed(choice)))


# ------------------------------------------------------------------------------------------------- the whole search


def table_search(
    problem: Problem, quantum: int = 1, cuts: CutFunction = even_cuts, *, each_transient: bool = True
) -> TablePlan | None:
    """Algorithm 1: loops over batch sizes, pipeline degrees and micro-batches, and keeps the best throughput."""
    best: TablePlan | None = None
    for batch in problem.batches:
        for degree, costs in _stage_costs(problem):
            for micro_batches in _micro_batch_counts(problem, batch, degree):
                for positions in cuts(len(problem.cost.model.layers), degree):
                    plan = solve_combination(
                        problem, costs, batch, micro_batches, positions, quantum, each_transient=each_transient
                    )
                    if plan and (best is None or plan.batch * best.iteration_ns > best.batch * plan.iteration_ns):
                        best = plan
    return best


def solve_combination(
    problem: Problem,
    costs: StageCosts,
    batch: int,
    micro_batches: int,
    positions: Positions,
    quantum: int = 1,
    *,
    each_transient: bool = True,
) -> TablePlan | None:
    """Lines 8 to 10: the dynamic program for each stage, added up (with the pipeline's bubbles, which line 9 omits)."""
    degree = len(positions) - 1
    stages = []
    for stage in range(degree):
        solutions = [
            solve_stage_by_table(stage_problem, problem.budget, quantum, each_transient=each_transient)
            for stage_problem in build_stages(problem, costs, batch, micro_batches, positions, stage)
        ]
        found = [solution for solution in solutions if solution is not None]
        if not found:
            return None
        stages.append(min(found, key=lambda solution: solution.time))
    times = [stage.time for stage in stages]
    iteration = sum(times) + (micro_batches - 1) * max(times)
    return TablePlan(batch, degree, micro_batches, iteration, positions, tuple(stages))


def build_stages(
    problem: Problem, costs: StageCosts, batch: int, micro_batches: int, positions: Sequence[int], stage: int
) -> Iterator[StageProblem]:
    """The tables of one stage of a pipeline cut at these positions; where layers borrow a tied weight, for each way in
    which its owner splits it."""
    names = [kind.name for kind in problem.cost.model.kinds]
    kinds = [names.index(layer.name) for layer in problem.cost.model.layers]
    degree, begin, end = len(positions) - 1, positions[stage], positions[stage + 1]
    tables = costs.tables(np.array(batch // micro_batches), np.array(micro_batches))
    transfer = costs.transfer_ns(batch // micro_batches)
    nothing: Integers = np.zeros(transfer.shape[1], dtype=np.int64)
    held = 1
    if degree > 1:
        held = micro_batches if problem.schedule is GPIPE else min(micro_batches, degree - stage)
    whole = StageProblem(
        kinds=np.arange(end - begin),
        time=tables.time_ns[kinds[begin:end]],
        memory=(tables.state_bytes + held * tables.activation_bytes)[kinds[begin:end]],
        transient=tables.transient_bytes[kinds[begin:end]],
        layout_of=costs.layout_of,
        change=costs.change_ns(batch // micro_batches)[kinds[begin:end]],
        entry=transfer[kinds[begin - 1]] if begin else nothing,
        exit=transfer[kinds[end - 1]] if end < len(kinds) else nothing,
    )
    sharing = costs.tied_places(kinds[begin:end], first=begin == 0)
    if len(sharing) < 2:
        yield whole
        return
    owner, users = sharing[0], sharing[1:]
    rows = [kinds[begin + user] for user in users]
    for variant in range(len(costs.splits)):
        paid = costs.resplit(batch // micro_batches, variant)
        time, memory, transient = whole.time.copy(), whole.memory.copy(), whole.transient.copy()
        time[owner, costs.split_of[kinds[begin + owner]] != variant] = NEVER
        time[users] += paid.time_ns[rows]
        memory[users] += held * paid.activation_bytes[rows]
        transient[users] += paid.transient_bytes[rows]
        yield replace(whole, time=time, memory=memory, transient=transient)


def _stage_costs(problem: Problem) -> Iterator[tuple[int, StageCosts]]:
    devices = problem.cost.cluster.devices
    for degree in problem.space.pipeline_degrees(devices):
        if degree <= len(problem.cost.model.layers):
            yield degree, problem.cost.stage(problem.space.strategies(devices // degree), degree)


def _micro_batch_counts(problem: Problem, batch: int, degree: int) -> list[int]:
    """Counts that divide the batch: without a pipeline one, unless gradients may accumulate; under 1F1B at least as
    many as stages."""
    if degree == 1 and not problem.space.switches.accumulation:
        return [1]
    least = degree if problem.schedule is ONE_F_ONE_B else 1
    most = problem.max_micro_batches or batch
    return [count for count in range(least, min(batch, most) + 1) if batch % count == 0]
