"""Layers with experts: candidates that are thinned and priced in parts against brute force over all of them.

What would break: a choice of axes for the experts left out that an optimum needs, a price added twice or not at all, a
bound that is not one because a strategy and its experts were taken apart.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from longer import longer
from random_parts import random_cluster
from search_oracles import (
    Rng,
    brute_search,
    check_plan,
    limited,
    random_expert_problem,
    stage_costs,
    stage_of,
)
from stage_program import CLUSTER, block, in_large_units, least_time_by_milp

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Experts, Kind, LayerSpec, ModelSpec, Strategy, Training
from galvatron.planner.cost import GALVATRON, NEVER, CostModel, experts
from galvatron.planner.search import Candidates, Optimum, Problem, StageProblem, search, solve_stage
from galvatron.planner.search.thinning import undominated
from galvatron.planner.space import Space, Switches


def throughput(optimum: Optimum | None) -> Fraction:
    return Fraction(optimum.batch, optimum.solved.iteration_ns) if optimum else Fraction(0)


def problems(seed: int, trials: int) -> list[Problem]:
    found = []
    for trial in range(trials):
        rng: Rng = np.random.default_rng((31, seed, trial))
        found.append(limited(rng, random_expert_problem(rng, most_work=2500), least=0.5))
    return found


@pytest.mark.parametrize(("seed", "trials"), [(0, 14), *(longer(seed, 70) for seed in range(8))])
def test_equals_brute_force(seed: int, trials: int) -> None:
    """24 problems, in the longer run 560: models in which layers with experts stand between dense ones."""
    feasible = apart = mixed = 0
    for number, problem in enumerate(problems(seed, trials)):
        expected, optimum = brute_search(problem), search(problem)
        assert (optimum is None) == (expected is None), number
        if optimum is None or expected is None:
            continue
        check_plan(problem, optimum)
        assert throughput(optimum) == Fraction(expected.batch, expected.iteration_ns), number
        feasible += 1
        strategies = [strategy for stage in optimum.strategies for strategy in stage]
        apart += any(strategy.experts for strategy in strategies)
        mixed += len({bool(strategy.experts) for strategy in strategies}) == 2
    assert feasible >= trials // 2, "the instances test too little: most have no solution"
    assert apart >= trials * 3 // 14, "experts seldom have axes of their own, so the comparison proves little"
    assert mixed >= trials // 14


def test_brute_force_notices_an_all_to_all_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a search that exchanges tokens for free finds other optima."""
    given = problems(0, 16)
    expected = [brute_search(problem) for problem in given]
    monkeypatch.setattr(experts, "all_to_all_s", lambda message_bytes, group: 0.0 * message_bytes * group.size)
    wrong = 0
    for problem, plan in zip(given, expected, strict=True):
        optimum = search(problem)
        if plan is not None and optimum is not None:
            wrong += throughput(optimum) != Fraction(plan.batch, plan.iteration_ns)
    assert wrong >= 2


def test_least_prices_are_those_of_all_candidates() -> None:
    """Bounds take strategies and their experts apart; what is least of the sums must be what is least of all."""
    for problem in problems(9, 10):
        for degree in problem.space.pipeline_degrees(problem.cost.cluster.devices):
            if degree > len(problem.cost.model.layers):
                continue
            micro_batch, counts, held = np.array([8, 24]), np.array([1, 4]), np.array([1, 2])
            tables = stage_costs(problem, degree).tables(micro_batch, counts)
            candidates = Candidates.of(problem.cost, problem.space, degree)
            prices = candidates.prices(candidates.tables(micro_batch, counts), held)
            usable = tables.time_ns < NEVER
            memory = np.where(usable, tables.state_bytes + held[:, None, None] * tables.activation_bytes, NEVER)
            assert (np.minimum(prices.time, NEVER) == tables.time_ns.min(axis=2)).all()
            assert (np.minimum(prices.memory, NEVER) == memory.min(axis=2)).all()
            transient = np.where(usable, tables.transient_bytes, NEVER).min(axis=2)
            assert (np.minimum(prices.transient, NEVER) == transient).all()
            for lam in prices.multipliers(1)[:6].tolist():
                above = tables.time_ns + lam * (memory - memory.min(axis=2, keepdims=True))
                possible = usable.any(axis=2)
                assert prices.priced(lam)[possible] == pytest.approx(above.min(axis=2)[possible], rel=1e-9)


@pytest.mark.parametrize("rounds", [0, 2, 60])
def test_what_is_left_out_is_beaten_by_something_kept(rounds: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        groups, prices = rng.integers(0, 4, 60), rng.integers(0, 6, (3, 60))
        kept = undominated(groups, prices, rounds)
        assert sorted(set(kept.tolist())) == kept.tolist()
        for number in set(range(60)) - set(kept.tolist()):
            rivals = [other for other in kept.tolist() if groups[other] == groups[number]]
            assert any((prices[:, other] <= prices[:, number]).all() for other in rivals)
        for number in kept.tolist() if rounds == 60 else []:
            others = [other for other in kept.tolist() if groups[other] == groups[number] and other != number]
            assert not any((prices[:, other] <= prices[:, number]).all() for other in others)


def test_without_the_switch_experts_follow() -> None:
    """Turned off, the space is the one that there was: no strategy has axes for experts, and no plan gets faster."""
    slower = 0
    for problem in problems(2, 10):
        off = replace(problem.space, switches=replace(problem.space.switches, expert_parallel=False))
        without = search(replace(problem, space=off))
        kinds = replace(problem.space, kinds=problem.space.kinds - {Kind.EP})
        assert throughput(without) == throughput(search(replace(problem, space=kinds)))
        if without is not None:
            assert not any(strategy.experts for stage in without.strategies for strategy in stage)
        switched_on = throughput(search(problem))
        assert throughput(without) <= switched_on
        slower += throughput(without) < switched_on
    assert slower >= 2


def test_a_cluster_of_uneven_links_is_searched_too() -> None:
    """On 8 devices in islands of two, axes of the experts that differ only in their order differ in price."""
    rng = np.random.default_rng(8)
    problem = next(one for one in problems(4, 40) if one.cost.cluster.devices == 8)
    cluster = random_cluster(rng, 8)
    problem = replace(problem, cost=replace(problem.cost, cluster=cluster))
    expected, optimum = brute_search(problem), search(problem)
    assert throughput(optimum) == (Fraction(expected.batch, expected.iteration_ns) if expected else 0)


def test_experts_have_no_tp_beside_divided_sequences() -> None:
    """The runtime refuses it: TP ranks of experts have the same tokens, those of divided sequences have not."""
    tensor_parallel = _sparse().tensor_parallel
    assert tensor_parallel is not None
    divisible = replace(_sparse(), tensor_parallel=replace(tensor_parallel, sequence_divides=(512,)))
    model = ModelSpec(name="sparse", family="custom", layers=(divisible,) * 4, training=Training())
    cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
    space = Space(
        name="full",
        title="",
        kinds=frozenset({Kind.SDP, Kind.TP, Kind.EP}),
        switches=Switches(sequence_parallel=True, expert_parallel=True),
    )
    candidates = Candidates.of(cost, space, 1)
    columns = candidates.columns(candidates.tables(np.array([16]), np.array([1])), [1])
    found = [candidates.strategy(columns, index) for index in range(len(columns.strategy))]
    tensor = {own.sequence_parallel for own in found if own.experts and own.expert_factors(Kind.TP)}
    assert tensor == {False}
    assert any(own.experts and own.sequence_parallel for own in found)
    with pytest.raises(InvalidInput, match="hold different tokens under"):
        Strategy.parse("dp4-tp2/ep4-tp2+sp")
    assert model.allows(divisible, Strategy.parse("dp4-tp2/ep4-tp2"))


def _sparse() -> LayerSpec:
    """A block with 16 experts."""
    dense = block("sparse", 1024, 512, 16)
    return replace(
        dense,
        parameters=dense.parameters + 16 * 8 * 1024 * 1024,
        experts=Experts(
            count=16,
            parameters=16 * 8 * 1024 * 1024,
            forward_flops=8 * 512 * 1024 * 1024,
            activation_bytes=24 * 512 * 1024,
            replicated_activation_bytes=8 * 512 * 1024,
            dispatch_bytes=8 * 512 * 1024,
            divides=(4096,),
            imbalance=1.2,
        ),
    )


def _expert_stage(budget_gib: int) -> tuple[StageProblem, StageProblem, int]:
    """Dense layers and layers with experts in turn on 8 devices: with all candidates, and with those that are left when
    strategies and axes of experts are priced apart and thinned; in whole microseconds and MiB."""
    dense, sparse = block("dense", 1024, 512, 16), _sparse()
    layers = ([dense] * 2 + [sparse] * 2) * 4
    model = ModelSpec(name="sparse", family="custom", layers=tuple(layers), training=Training())
    cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
    kinds = frozenset({Kind.SDP, Kind.TP, Kind.EP})
    switches = Switches(recompute=True, expert_parallel=True)
    space = Space(name="full", title="", kinds=kinds, switches=switches)
    problem = Problem(cost=cost, space=space, budget=0, batches=(16,))
    whole = stage_of(problem, stage_costs(problem, 1), 16, 1, 1, 0, 0, len(layers))
    candidates = Candidates.of(cost, space, 1)
    columns = candidates.columns(candidates.tables(np.array([16]), np.array([1])), [1])
    assert len(columns.strategy) < whole.time.shape[1]
    thinned = replace(
        whole,
        time=columns.tables.time_ns,
        memory=columns.tables.state_bytes + columns.tables.activation_bytes,
        transient=columns.tables.transient_bytes,
        layout_of=candidates.costs.layout_of[columns.strategy],
        change=candidates.costs.change_ns(16),
    )
    return in_large_units(whole), in_large_units(thinned), budget_gib << 10


@pytest.mark.parametrize("budget_gib", [4, 6, 16])
def test_equals_an_integer_program_with_experts(budget_gib: int) -> None:
    """HiGHS chooses among all axes of experts, the search among the thinned ones."""
    whole, thinned, budget = _expert_stage(budget_gib)
    expected = least_time_by_milp(whole, budget)
    assert expected is not None
    for stage in (whole, thinned):
        found = solve_stage(stage, budget)
        assert found is not None
        assert found.time == expected
