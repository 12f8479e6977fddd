"""Random instances and brute-force answers for the tests of the search.

Nothing here uses the search's own code: brute force adds up plain integers (layers from the cost tables, what moves
between them from ``moving_oracle``, tied weights from ``tied_oracle``) and enumerates what the space allows. It is
slow on purpose; instances are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise, product

import numpy as np
from moving_oracle import moves
from random_parts import random_cluster, random_expert_model, random_expert_space, random_model, random_space
from tied_oracle import price, sharers, split_over

from galvatron.core.spec import GPIPE, ONE_F_ONE_B
from galvatron.planner.cost import GALVATRON, NEVER, PAPER_SYSTEMS, CostModel, Integers, StageCosts
from galvatron.planner.search import Optimum, Problem, StageProblem, search
from galvatron.planner.search.cuts import CutRule, balanced_cuts

Rng = np.random.Generator
ENOUGH = 1 << 50
"""A budget that nothing exceeds."""


# ------------------------------------------------------------------------------------------------------- one stage


def random_stage(rng: Rng, layers: int, strategies: int, *, top_time: int = 30, top_memory: int = 12) -> StageProblem:
    """A stage of small whole numbers: many ties, forbidden strategies, changes that obey no triangle inequality."""
    kinds = int(rng.integers(1, min(layers, 3) + 1))
    layouts = int(rng.integers(1, strategies + 1))
    time = rng.integers(0, top_time, (kinds, strategies))
    time[rng.random(time.shape) < rng.choice([0.0, 0.15, 0.5])] = NEVER
    top_change = int(rng.choice([1, 3, top_time, 4 * top_time]))
    change = rng.integers(0, top_change, (kinds, layouts, layouts))
    if rng.random() < 0.8:
        change[:, np.arange(layouts), np.arange(layouts)] = 0
    top_transient = int(rng.choice([1, 3, 2 * top_memory]))
    return StageProblem(
        kinds=rng.integers(0, kinds, layers) if rng.random() < 0.5 else np.sort(rng.integers(0, kinds, layers)),
        time=time,
        memory=rng.integers(0, top_memory, time.shape),
        transient=rng.integers(0, top_transient, time.shape),
        layout_of=rng.integers(0, layouts, strategies),
        change=change,
        entry=rng.integers(0, int(rng.choice([1, top_time])), layouts),
        exit=rng.integers(0, int(rng.choice([1, top_time])), layouts),
    )


def binding_budget(rng: Rng, problem: StageProblem) -> int:
    """A budget between less than the least and as much as the most that the layers can need."""
    memory = problem.memory[problem.kinds]
    least, most = int(memory.min(axis=1).sum()), int(memory.max(axis=1).sum() + problem.transient.max())
    return least + int((most - least) * rng.uniform(-0.05, 0.8))


def evaluate(problem: StageProblem, choice: Sequence[int]) -> tuple[int, int]:
    """(time, peak memory) of one assignment, added up in plain integers."""
    kinds = problem.kinds.tolist()
    layouts = [int(problem.layout_of[s]) for s in choice]
    time = int(problem.entry[layouts[0]]) + int(problem.exit[layouts[-1]])
    time += sum(int(problem.time[kind, s]) for kind, s in zip(kinds, choice, strict=True))
    time += sum(int(problem.change[kinds[i], layouts[i], layouts[i + 1]]) for i in range(len(kinds) - 1))
    memory = sum(int(problem.memory[kind, s]) for kind, s in zip(kinds, choice, strict=True))
    return time, memory + max(int(problem.transient[kind, s]) for kind, s in zip(kinds, choice, strict=True))


def brute_stage(problem: StageProblem, budget: int) -> int | None:
    """Least time over all assignments that fit."""
    outcomes = (
        evaluate(problem, choice) for choice in product(range(problem.time.shape[1]), repeat=len(problem.kinds))
    )
    return min((time for time, peak in outcomes if peak <= budget and time < NEVER), default=None)


def enumerate_stage(problem: StageProblem, budget: int) -> int | None:
    """As :func:`brute_stage`, but assignments that agree in last layout, memory and largest transient are one.

    Only the fastest of those can be part of an optimum, since all that follows depends on nothing else.
    """
    kinds = problem.kinds.tolist()
    time, memory, transient = problem.time.tolist(), problem.memory.tolist(), problem.transient.tolist()
    change, layout_of = problem.change.tolist(), problem.layout_of.tolist()
    outcomes: dict[tuple[int, int, int], int] = {}
    for layer, kind in enumerate(kinds):
        usable = [s for s in range(len(layout_of)) if time[kind][s] < NEVER]
        after: dict[tuple[int, int, int], int] = {}
        for s in usable:
            layout, need, working, spent = layout_of[s], memory[kind][s], transient[kind][s], time[kind][s]
            if layer == 0:
                before: Iterator[tuple[int, int, int]] = iter([(0, 0, int(problem.entry[layout]))])
            else:
                changes = change[kinds[layer - 1]]
                before = ((m, t, ns + changes[k][layout]) for (k, m, t), ns in outcomes.items())
            for held, largest, arrived in before:
                key = (layout, held + need, max(largest, working))
                if key[1] + key[2] <= budget and arrived + spent < after.get(key, NEVER):
                    after[key] = arrived + spent
        outcomes = after
    totals = (ns + int(problem.exit[layout]) for (layout, _, _), ns in outcomes.items())
    return min((total for total in totals if total < NEVER), default=None)


# ----------------------------------------------------------------------------------------------- the whole search


@dataclass(frozen=True, slots=True)
class BrutePlan:
    """The best plan by enumeration; among equals the first in (batch, pipeline degree, micro-batches)."""

    batch: int
    pipeline_degree: int
    micro_batches: int
    iteration_ns: int


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def micro_batch_counts(problem: Problem, batch: int, degree: int) -> list[int]:
    """Divisors of the batch: without a pipeline only one unless gradients accumulate, under 1F1B not fewer than
    stages, and no more than the problem allows."""
    counts = [count for count in range(1, batch + 1) if batch % count == 0]
    if degree == 1 and not problem.space.switches.accumulation:
        return [1]
    if problem.schedule is ONE_F_ONE_B:
        counts = [count for count in counts if count >= degree]
    return [count for count in counts if problem.max_micro_batches is None or count <= problem.max_micro_batches]


def stage_costs(problem: Problem, degree: int) -> StageCosts:
    """All candidates, none of them thinned. Context axes are for models that have attention which can take them."""
    model = problem.cost.model
    strategies = problem.space.strategies(problem.cost.cluster.devices // degree, experts=model.has_experts)
    attending = [kind for kind in model.kinds if kind.context is not None and kind.context.heads]
    taken = [
        own for own in strategies if own.context_degree == 1 or any(kind.allows_context(own) for kind in attending)
    ]
    return problem.cost.stage(taken or strategies, degree)


def stage_of(
    problem: Problem, costs: StageCosts, batch: int, micro_batches: int, degree: int, stage: int, begin: int, end: int
) -> StageProblem:
    """The tables of the layers from begin to end as one stage of a pipeline."""
    model = problem.cost.model
    names = [kind.name for kind in model.kinds]
    kinds = [names.index(layer.name) for layer in model.layers]
    tables = costs.tables(np.array(batch // micro_batches), np.array(micro_batches))
    moved = moves(
        costs.strategies,
        model,
        problem.cost.cluster,
        micro_batch=batch // micro_batches,
        pipelined=degree > 1,
        counts_rows=problem.cost.conventions is GALVATRON,
    )
    nothing: Integers = np.zeros(moved.transfer.shape[1], dtype=np.int64)
    held = _held(problem, degree, stage, micro_batches)
    return StageProblem(
        kinds=np.array(kinds[begin:end]),
        time=tables.time_ns,
        memory=tables.state_bytes + held * tables.activation_bytes,
        transient=tables.transient_bytes,
        layout_of=moved.layout_of,
        change=moved.change,
        entry=moved.transfer[kinds[begin - 1]] if begin > 0 else nothing,
        exit=moved.transfer[kinds[end - 1]] if end < len(kinds) else nothing,
    )


def borrowing_stages(
    problem: Problem, costs: StageCosts, batch: int, micro_batches: int, degree: int, stage: int, begin: int, end: int
) -> Iterator[StageProblem]:
    """The same stage for each way in which the owner of a tied weight may split it, a kind a layer."""
    whole = stage_of(problem, costs, batch, micro_batches, degree, stage, begin, end)
    sharing = sharers(problem, begin, end)
    if len(sharing) < 2:
        yield whole
        return
    layers = problem.cost.model.layers
    held = _held(problem, degree, stage, micro_batches)
    splits = [split_over(layers[sharing[0]], strategy) for strategy in costs.strategies]
    for owner in dict.fromkeys(splits):
        time, memory, transient = (table[whole.kinds] for table in (whole.time, whole.memory, whole.transient))
        for s, strategy in enumerate(costs.strategies):
            if splits[s] != owner:
                time[sharing[0] - begin, s] = NEVER
            for user in sharing[1:]:
                extra = price(problem, owner, layers[user], strategy, batch // micro_batches)
                time[user - begin, s] += extra.ns
                memory[user - begin, s] += held * extra.saved
                transient[user - begin, s] += extra.transient
        yield replace(
            whole, kinds=np.arange(end - begin), time=time, memory=memory, transient=transient,
            change=whole.change[whole.kinds],
        )  # fmt: skip


def _held(problem: Problem, degree: int, stage: int, micro_batches: int) -> int:
    """Micro-batches in flight."""
    if degree == 1:
        return 1
    return micro_batches if problem.schedule is GPIPE else min(micro_batches, degree - stage)


def brute_search(
    problem: Problem, cuts: Callable[[int, int], Iterable[tuple[int, ...]]] | None = None
) -> BrutePlan | None:
    """Everything: batches × pipeline degrees × micro-batches × cuts × strategies.

    ``cuts``: from batch and pipeline degree to the cuts to try, where these are not all.
    """
    best: BrutePlan | None = None
    layers = len(problem.cost.model.layers)
    devices = problem.cost.cluster.devices
    for batch, degree in product(problem.batches, problem.space.pipeline_degrees(devices)):
        if degree > layers:
            continue
        costs = stage_costs(problem, degree)
        for micro_batches in micro_batch_counts(problem, batch, degree):
            times: dict[tuple[int, int, int], int | None] = {}
            for positions in cuts(batch, degree) if cuts else all_cuts(layers, degree):
                stages = []
                for stage, (begin, end) in enumerate(pairwise(positions)):
                    key = (stage, begin, end)
                    if key not in times:
                        found = [
                            enumerate_stage(tables, problem.budget)
                            for tables in borrowing_stages(problem, costs, batch, micro_batches, degree, *key)
                        ]
                        times[key] = min((time for time in found if time is not None), default=None)
                    stages.append(times[key])
                known = [time for time in stages if time is not None]
                if len(known) < len(stages):
                    continue
                iteration = iteration_of(known, micro_batches, problem)
                if best is None or batch * best.iteration_ns > best.batch * iteration:
                    best = BrutePlan(batch, degree, micro_batches, iteration)
    return best


def rule_cuts(problem: Problem, rule: CutRule, batch: int, degree: int) -> Iterable[tuple[int, ...]]:
    """The paper's guidelines by their definition: layers weigh what the rule says, but single ones beside repeated ones
    nothing."""
    model = problem.cost.model
    names = [layer.name for layer in model.layers]
    samples = batch / (problem.cost.cluster.devices // degree)
    speed = problem.cost.cluster.device.flops_per_s(model.training.precision)
    repeated = {name for name in names if names.count(name) > 1}
    weights = []
    for layer in model.layers:
        by_rule = {
            CutRule.LAYERS: 1.0,
            CutRule.PARAMETERS: float(layer.parameters),
            CutRule.MEMORY: 16 * layer.parameters + samples * layer.activation_bytes,
            CutRule.TIME: layer.forward_flops / speed,
        }
        weights.append(by_rule[rule] if layer.name in repeated or not repeated else 0.0)
    yield balanced_cuts(np.array(weights), degree)


def check_plan(problem: Problem, optimum: Optimum) -> int:
    """Adds up a plan from the tables: its stages must take what it says and fit. Returns the largest peak."""
    positions, stages = optimum.solved.positions, optimum.solved.stages
    degree = optimum.pipeline_degree
    assert positions[0] == 0
    assert positions[-1] == len(problem.cost.model.layers)
    assert len(positions) - 1 == len(stages) == degree
    costs = stage_costs(problem, degree)
    numbers = {strategy: number for number, strategy in enumerate(costs.strategies)}
    peaks = []
    for stage, (solution, chosen) in enumerate(zip(stages, optimum.strategies, strict=True)):
        begin, end = positions[stage], positions[stage + 1]
        ways = borrowing_stages(problem, costs, optimum.batch, optimum.micro_batches, degree, stage, begin, end)
        outcomes = (evaluate(tables, [numbers[strategy] for strategy in chosen]) for tables in ways)
        time, peak = next(outcome for outcome in outcomes if outcome[0] < NEVER)  # the way its owner really splits
        assert time == solution.time
        assert peak <= problem.budget
        peaks.append(peak)
    times = [stage.time for stage in stages]
    assert optimum.solved.iteration_ns == iteration_of(times, optimum.micro_batches, problem)
    return max(peaks)


def iteration_of(times: Sequence[int], micro_batches: int, problem: Problem) -> int:
    """One micro-batch through all stages and the slowest again for each further one; where stages share cores, between
    that and the mean of the stages (docs/cost-model.md, "Shared cores")."""
    alone = sum(times) + (micro_batches - 1) * max(times)
    contention = min(Fraction(problem.cost.cluster.compute_contention), Fraction(len(times)))
    if contention == 1 or len(times) == 1:
        return alone
    mean = Fraction(micro_batches * sum(times), len(times))
    bubble = (len(times) / contention - 1) / contention
    return math.ceil(mean + bubble / (len(times) - 1) * (alone - mean))


# -------------------------------------------------------------------------------------------------- random problems


def random_problem(rng: Rng, most_work: int, scales: Sequence[int] = (4, 30, 1_000, 3_000_000)) -> Problem:
    """A problem without a memory limit whose brute force meets at most about ``most_work`` outcomes for a stage."""
    while True:
        devices = int(rng.choice([2, 4, 4, 6, 8]))
        space = random_space(rng)
        layers = int(rng.integers(2, 7))
        strategies = max(len(space.strategies(devices // degree)) for degree in space.pipeline_degrees(devices))
        if strategies and _outcomes(strategies, layers) <= most_work:
            break
    cost = CostModel(
        model=random_model(rng, layers, int(rng.choice(scales))),
        cluster=random_cluster(rng, devices),
        conventions=PAPER_SYSTEMS if rng.random() < 0.3 else GALVATRON,
        schedule=GPIPE if rng.random() < 0.5 else ONE_F_ONE_B,
    )
    sizes = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24])
    return Problem(
        cost=cost,
        space=space,
        budget=ENOUGH,
        batches=tuple(sorted(rng.choice(sizes, int(rng.integers(1, 4)), replace=False).tolist())),
        max_micro_batches=None if rng.random() < 0.7 else int(rng.integers(1, 9)),
    )


def random_expert_problem(rng: Rng, most_work: int) -> Problem:
    """The same for models with experts, on 4 or 8 devices."""
    while True:
        problem = random_problem(rng, most_work)
        devices = int(rng.choice([4, 8]))
        space, layers = random_expert_space(rng), int(rng.integers(2, 6))
        degrees = space.pipeline_degrees(devices)
        strategies = max(len(space.strategies(devices // degree, experts=True)) for degree in degrees)
        if strategies and _outcomes(strategies, layers) <= most_work:
            break
    model = random_expert_model(rng, layers, int(rng.choice([1_000, 3_000_000, 30_000_000])))
    cost = replace(problem.cost, model=model, cluster=random_cluster(rng, devices))
    batches = [(8,), (16,), (4, 24), (8, 16)][int(rng.integers(4))]  # most strategies can divide these
    return replace(problem, cost=cost, space=space, batches=batches)


def _outcomes(strategies: int, layers: int) -> int:
    """Multisets of strategies over the layers: how many outcomes enumeration meets at most, about."""
    count = 1
    for i in range(layers):
        count = count * (strategies + i) // (i + 1)
    return count


def as_brute_force(problem: Problem) -> Optimum | None:
    """What the search finds, after brute force has found none better and its times and memory are added up."""
    expected, optimum = brute_search(problem), search(problem)
    assert (optimum is None) == (expected is None)
    if optimum is None or expected is None:
        return None
    check_plan(problem, optimum)
    assert Fraction(optimum.batch, optimum.solved.iteration_ns) == Fraction(expected.batch, expected.iteration_ns)
    return optimum


def limited(rng: Rng, problem: Problem, least: float = 0.25) -> Problem:
    """The same with a budget, mostly below what the fastest plan without a limit needs, so that memory decides."""
    optimum = search(problem)
    if optimum is None:
        return problem
    return replace(problem, budget=int(check_plan(problem, optimum) * rng.uniform(least, 1.05)))
