"""The whole search against brute force over everything, and the promises that users rely on.

What would break: a combination excluded by a bound above its optimum, a stage time reused where it does not hold, cuts
that were never looked at, a plan that depends on the order of a set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from longer import longer
from random_parts import random_cluster
from search_oracles import (
    ENOUGH,
    brute_search,
    check_plan,
    limited,
    random_problem,
    rule_cuts,
    stage_costs,
    stage_of,
)

from galvatron.core.spec import GPIPE, ONE_F_ONE_B, Kind, LayerSpec, ModelSpec, Schedule, Training
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.search import Optimum, Problem, search
from galvatron.planner.search.cuts import CutRule
from galvatron.planner.space import EXTENDED, PAPER, Space, Switches
from table_search import all_cuts as table_cuts
from table_search import table_search


def throughput(optimum: Optimum | None) -> Fraction:
    """Samples a nanosecond; zero where nothing fits."""
    return Fraction(optimum.batch, optimum.solved.iteration_ns) if optimum else Fraction(0)


# ------------------------------------------------------------------------------------------------- the optimum itself


@pytest.mark.parametrize(("seed", "trials"), [(0, 14), *(longer(seed, 70) for seed in range(10))])
def test_equals_brute_force(seed: int, trials: int) -> None:
    """24 problems, in the longer run 700: random models, clusters, spaces, switches, schedules and batches."""
    feasible = binding = 0
    for trial in range(trials):
        rng = np.random.default_rng((seed, trial))
        free = random_problem(rng, most_work=1500)
        problem = limited(rng, free)
        expected = brute_search(problem)
        optimum = search(problem)
        assert (optimum is None) == (expected is None), (seed, trial)
        if optimum is None or expected is None:
            continue
        check_plan(problem, optimum)
        assert throughput(optimum) == Fraction(expected.batch, expected.iteration_ns), (seed, trial)
        feasible += 1
        binding += throughput(optimum) < throughput(search(free))
    assert feasible >= trials // 2, "the instances test too little: most have no solution"
    assert binding >= trials * 2 // 7, "the instances test too little: memory seldom decides"


@pytest.mark.parametrize("trials", [8, longer(120)])
def test_equals_brute_force_where_stages_share_cores(trials: int) -> None:
    """The pace of a pipeline then depends on the mean of its stages too; contentions are whole, so that it is exact."""
    feasible = deep = 0
    for trial in range(trials):
        rng = np.random.default_rng((23, trial))
        free = random_problem(rng, most_work=1500)
        cluster = replace(free.cost.cluster, compute_contention=float(2 ** int(rng.integers(1, 4))))
        problem = limited(rng, replace(free, cost=replace(free.cost, cluster=cluster)))
        expected, optimum = brute_search(problem), search(problem)
        assert (optimum is None) == (expected is None), trial
        if optimum is None or expected is None:
            continue
        check_plan(problem, optimum)
        assert throughput(optimum) == Fraction(expected.batch, expected.iteration_ns), trial
        feasible += 1
        deep += optimum.pipeline_degree > 1
    assert feasible >= trials * 5 // 12
    assert deep >= trials // 8, "pipelines seldom win, so the comparison proves little"


@pytest.mark.slow
def test_equals_brute_force_where_sequences_are_divided() -> None:
    """Layers with and without sequence parallelism side by side: gathering between them must be charged, and layers
    that have no sequence to divide must not take it."""
    mixed = plain = 0
    for trial in range(200):
        rng = np.random.default_rng((17, trial))
        free = random_problem(rng, most_work=1500)
        kinds = frozenset({Kind.DP, Kind.TP} if trial % 2 else {Kind.TP})
        space = Space(name="tp", title="", kinds=kinds, switches=Switches(sequence_parallel=True))
        free = replace(free, space=replace(space, pipeline="none" if trial % 3 else "any"))
        fastest = search(free)
        if fastest is None:
            continue
        problem = replace(free, budget=int(check_plan(free, fastest) * rng.uniform(0.6, 1.0)))
        expected, optimum = brute_search(problem), search(problem)
        assert throughput(optimum) == (Fraction(expected.batch, expected.iteration_ns) if expected else 0), trial
        if optimum is None:
            continue
        check_plan(problem, optimum)
        strategies = [strategy for stage in optimum.strategies for strategy in stage]
        for layer, strategy in zip(problem.cost.model.layers, strategies, strict=True):
            tensor = layer.tensor_parallel
            lengths = (tensor.sequence_divides if tensor else ()) or (1,)
            assert not strategy.sequence_parallel or not any(n % strategy.degree(Kind.TP) for n in lengths), trial
        for stage in optimum.strategies:
            mixed += any(a.sequence_parallel != b.sequence_parallel for a, b in pairwise(stage))
            plain += not any(strategy.sequence_parallel for strategy in stage)
    assert mixed >= 15, "sequences are seldom divided beside whole ones, so the comparison proves little"
    assert plain >= 20


@pytest.mark.parametrize("trials", [12, longer(25)])
def test_equals_the_table_with_all_cuts(trials: int) -> None:
    """Algorithm 1 over all cuts with a quantum of one byte: an oracle that shares no code with brute force."""
    feasible = 0
    for trial in range(trials):
        rng = np.random.default_rng((11, trial))
        problem = limited(rng, random_problem(rng, most_work=300, scales=(2, 4)))
        if problem.budget == ENOUGH:
            continue
        table, optimum = table_search(problem, 1, table_cuts), search(problem)
        expected = Fraction(table.batch, table.iteration_ns) if table else Fraction(0)
        assert throughput(optimum) == expected, trial
        feasible += table is not None
    assert feasible > trials * 2 // 5


def _pipeline_problem(*, shuffled: bool, schedule: Schedule) -> Problem:
    """40 layers on 8 devices, one a stage; 33 of them are tiny and in order best put into one stage."""

    def layer(name: str, weight: int) -> LayerSpec:
        return LayerSpec(
            name=name,
            parameters=1000 * weight,
            forward_flops=10_000 * weight,
            split_activation_bytes=3000 * weight,
            boundary_bytes=100,
        )

    order = [layer("small", 1)] * 33 + [layer("large", 60)] * 7
    rng = np.random.default_rng(21)
    if shuffled:
        order = [order[i] for i in rng.permutation(40)]
    cluster = random_cluster(rng, 8)
    cluster = replace(cluster, device=replace(cluster.device, layer_overhead_s=0.0))
    return Problem(
        cost=CostModel(
            model=ModelSpec(name="uneven", family="custom", layers=tuple(order), training=Training()),
            cluster=cluster,
            conventions=GALVATRON,
            schedule=schedule,
        ),
        space=Space(name="pp", title="", pipeline="all"),
        budget=ENOUGH,
        batches=(8, 16),
    )


@pytest.mark.parametrize(
    ("shuffled", "schedule"),
    [(False, ONE_F_ONE_B), (True, ONE_F_ONE_B), longer(False, GPIPE), longer(True, GPIPE)],
)
def test_equals_a_program_over_cuts_on_40_layers(shuffled: bool, schedule: Schedule) -> None:
    """One strategy, so a stage's time and memory are sums: every cut is tried, stages of over 24 layers included."""
    free = _pipeline_problem(shuffled=shuffled, schedule=schedule)
    optimum = search(free)
    assert optimum is not None
    widest = max(end - begin for begin, end in pairwise(optimum.solved.positions))
    assert shuffled or widest > 24, "the instance does not ask for long stages"
    for share in (1.0, 0.9, 0.7):
        problem = replace(free, budget=int(check_plan(free, optimum) * share))
        assert throughput(search(problem)) == _best_pipeline(problem)


def _best_pipeline(problem: Problem) -> Fraction:
    """Best throughput of 8 stages with one strategy, by a least sum for each limit on the slowest stage."""
    best = Fraction(0)
    layers, stages = len(problem.cost.model.layers), 8
    costs = stage_costs(problem, stages)
    for batch in problem.batches:
        for micro_batches in (count for count in range(1, batch + 1) if batch % count == 0):
            if problem.schedule is ONE_F_ONE_B and micro_batches < stages:
                continue
            time = np.full((stages, layers + 1, layers + 1), np.inf)
            for stage in range(stages):
                whole = stage_of(problem, costs, batch, micro_batches, stages, stage, 0, layers)
                ns = np.concatenate([[0], np.cumsum(whole.time[whole.kinds, 0])])
                held = np.concatenate([[0], np.cumsum(whole.memory[whole.kinds, 0])])
                working = whole.transient[whole.kinds, 0]
                transfer = costs.transfer_ns(batch // micro_batches)[:, 0][whole.kinds]
                for begin in range(layers):
                    for end in range(begin + 1, layers + 1):
                        if held[end] - held[begin] + working[begin:end].max() <= problem.budget:
                            ends = (transfer[begin - 1] if begin else 0) + (transfer[end - 1] if end < layers else 0)
                            time[stage, begin, end] = ns[end] - ns[begin] + ends
            least = np.inf
            for limit in np.unique(time[np.isfinite(time)]):
                reach = np.full(layers + 1, np.inf)
                reach[0] = 0
                for stage in range(stages):
                    within = np.where(time[stage] <= limit, time[stage], np.inf)
                    reach = (reach[:, None] + within).min(axis=0)
                least = min(least, reach[layers] + (micro_batches - 1) * limit)
            if np.isfinite(least):
                best = max(best, Fraction(batch, int(least)))
    return best


# ------------------------------------------------------------------------------------------------------- the promises


@pytest.mark.parametrize("trials", [5, longer(60)])
def test_more_memory_is_never_slower(trials: int) -> None:
    """A user who buys memory must not get a slower plan: throughput rises with the budget, step by step."""
    rises = 0
    for trial in range(trials):
        rng = np.random.default_rng((12, trial))
        problem = limited(rng, random_problem(rng, most_work=20_000))
        budgets = [int(problem.budget * share) for share in (0.5, 0.7, 0.9, 1.0, 1.001, 1.1, 1.5, 2.5)]
        speeds = [throughput(search(replace(problem, budget=budget))) for budget in budgets]
        assert speeds == sorted(speeds), trial
        rises += speeds[0] < speeds[-1]
    assert rises > trials // 2


@pytest.mark.parametrize("trials", [5, longer(60)])
def test_a_larger_space_is_never_slower(trials: int) -> None:
    """More kinds, pipelines, switches or batches: whatever the smaller space finds is in the larger one too."""
    rises = 0
    for trial in range(trials):
        rng = np.random.default_rng((13, trial))
        problem = limited(rng, random_problem(rng, most_work=20_000))
        least = Space(name="s", title="", kinds=frozenset({Kind.DP}), pipeline="none")
        growing = [
            least,
            replace(least, pipeline="any"),
            replace(least, pipeline="any", kinds=frozenset({Kind.DP, Kind.TP})),
            replace(least, pipeline="any", kinds=frozenset(Kind)),
            replace(least, pipeline="any", kinds=frozenset(Kind), switches=Switches(recompute=True)),
            replace(least, pipeline="any", kinds=frozenset(Kind), switches=EXTENDED),
        ]
        speeds = [throughput(search(replace(problem, space=space))) for space in growing]
        speeds.append(throughput(search(replace(problem, space=growing[-1], batches=(*problem.batches, 32)))))
        assert speeds == sorted(speeds), trial
        rises += speeds[0] < speeds[-1]
    assert rises > trials * 30 // 60


def _best_by_rule(problem: Problem, rule: CutRule) -> Fraction:
    expected = brute_search(problem, lambda batch, degree: rule_cuts(problem, rule, batch, degree))
    return Fraction(expected.batch, expected.iteration_ns) if expected else Fraction(0)


_RULES = [rule for rule in CutRule if rule is not CutRule.EXACT]


@pytest.mark.parametrize(("rule", "trials"), [(CutRule.MEMORY, 12), *(longer(rule, 40) for rule in _RULES)])
def test_cuts_by_a_rule_are_optimal_for_the_rule_and_never_beat_exact_cuts(rule: CutRule, trials: int) -> None:
    slower = 0
    for trial in range(trials):
        rng = np.random.default_rng((14, trial))
        problem = limited(rng, random_problem(rng, most_work=300))
        ruled = search(replace(problem, cuts=rule))
        if ruled is not None:
            check_plan(problem, ruled)
        assert throughput(ruled) == _best_by_rule(problem, rule), trial
        exact = throughput(search(problem))
        assert throughput(ruled) <= exact, trial
        slower += throughput(ruled) < exact
    assert slower > 0, "exact cuts never matter here, so the comparison proves nothing"


def test_the_memory_rule_may_prefer_a_smaller_batch() -> None:
    """Cuts by memory depend on the batch, so a larger batch with equal micro-batches can be the slower one.

    Two slow layers full of parameters, then four fast ones full of activations, in two stages: for 2 samples the rule
    divides the parameters and thus the work, for 64 it divides the activations and puts both slow layers together.
    """
    slow = LayerSpec(name="slow", parameters=10_000, forward_flops=10**6, split_activation_bytes=10, boundary_bytes=10)
    fast = replace(slow, name="fast", parameters=10, forward_flops=10, split_activation_bytes=10_000)
    cluster = random_cluster(np.random.default_rng(0), 2)
    cluster = replace(cluster, device=replace(cluster.device, fp32_flops_per_s=1e8, memory_bytes_per_s=1e12))
    model = ModelSpec(name="uneven", family="custom", layers=(slow,) * 2 + (fast,) * 4, training=Training())
    problem = Problem(
        cost=CostModel(model=model, cluster=cluster, conventions=GALVATRON),
        space=Space(name="pp", title="", pipeline="all"),
        budget=ENOUGH,
        batches=(2, 64),
        cuts=CutRule.MEMORY,
    )
    optimum = search(problem)
    assert optimum is not None
    assert throughput(optimum) == _best_by_rule(problem, CutRule.MEMORY)
    assert (optimum.batch, optimum.solved.positions) == (2, (0, 1, 6))


@pytest.mark.parametrize("trials", [10, longer(40)])
@pytest.mark.parametrize("rule", _RULES)
def test_cuts_by_a_rule_warn_about_nothing(rule: CutRule, trials: int) -> None:
    """Models in which no layer is repeated, budgets in which a stage cannot fit: an answer, not a numpy warning."""
    for trial in range(trials):
        rng = np.random.default_rng((14, trial))
        problem = limited(rng, random_problem(rng, most_work=300))
        search(replace(problem, cuts=rule))


def test_layers_that_take_no_time_can_be_planned() -> None:
    """Figures of the user's own may be zero; a bound of zero must not end in a division by zero."""
    layer = LayerSpec(name="nothing", parameters=0, forward_flops=0, split_activation_bytes=8, boundary_bytes=0)
    model = ModelSpec(name="nothing", family="custom", layers=(layer, layer), training=Training())
    cluster = random_cluster(np.random.default_rng(0), 2)
    cluster = replace(
        cluster,
        device=replace(cluster.device, layer_overhead_s=0.0),
        levels=tuple(replace(level, latency_s=0.0) for level in cluster.levels),
    )
    problem = Problem(
        cost=CostModel(model=model, cluster=cluster, conventions=GALVATRON, schedule=GPIPE),
        space=Space(name="full", title="", switches=PAPER),
        budget=1000,
        batches=(2,),
    )
    optimum = search(problem)
    assert optimum is not None
    assert optimum.solved.iteration_ns == 2, "a layer takes at least a nanosecond"


def test_the_proof_counts_what_was_looked_at() -> None:
    for trial in range(12):
        rng = np.random.default_rng((15, trial))
        problem = limited(rng, random_problem(rng, most_work=5000))
        optimum = search(problem)
        if optimum is not None:
            proof = optimum.proof
            assert 1 <= proof.solved <= proof.opened <= proof.combinations
            assert proof.stages_solved >= 1


_PRINT_PLANS = """
import numpy as np
from search_oracles import limited, random_problem
from galvatron.planner.search import search
for trial in range(16):
    rng = np.random.default_rng((16, trial))
    optimum = search(limited(rng, random_problem(rng, most_work=20_000, scales=(2, 30, 3_000_000))))
    if optimum is None:
        print(trial, None)
    else:
        choices = [stage.choice for stage in optimum.solved.stages]
        names = [[str(strategy) for strategy in stage] for stage in optimum.strategies]
        print(trial, optimum.batch, optimum.micro_batches, optimum.solved, choices, names, optimum.proof)
"""


def test_plans_are_identical_in_every_process() -> None:
    """Two processes with different hash seeds print the same plans, byte for byte: no set decides anything."""
    outputs = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_PLANS], env=environment, capture_output=True, check=True, timeout=120
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"Solved") > 8
