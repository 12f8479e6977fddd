"""The stage solver against brute force, the paper's table and an integer program.

What would break: a bound that is not a bound, a label dropped that was needed, a transient counted twice or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from longer import longer
from search_oracles import binding_budget, brute_stage, enumerate_stage, evaluate, random_stage, stage_costs, stage_of
from stage_program import CLUSTER, block, in_large_units, least_time_by_milp, rounded_up

from galvatron.core.spec import (
    ModelSpec,
    Training,
)
from galvatron.planner.cost import GALVATRON, NEVER, CostModel
from galvatron.planner.search import Problem, StageProblem, solve_stage
from galvatron.planner.space import Space, Switches
from table_search import solve_stage_by_table


def solved_time(problem: StageProblem, budget: int) -> int | None:
    """What the solver says, after a check that its assignment really takes that time and fits."""
    solution = solve_stage(problem, budget)
    if solution is None:
        return None
    time, peak = evaluate(problem, solution.choice)
    assert time == solution.time
    assert peak <= budget
    return solution.time


@pytest.mark.parametrize("seed", [*range(3), *map(longer, range(3, 8))])
def test_equals_brute_force_on_small_stages(seed: int) -> None:
    """300 stages, in the longer run 800, of up to 5 layers and 5 strategies, most of them with a budget that binds."""
    rng = np.random.default_rng(seed)
    feasible = 0
    for _ in range(100):
        problem = random_stage(rng, layers=int(rng.integers(1, 6)), strategies=int(rng.integers(1, 6)))
        budget = binding_budget(rng, problem)
        expected = brute_stage(problem, budget)
        assert solved_time(problem, budget) == expected
        assert enumerate_stage(problem, budget) == expected, "the oracle of the outer search is itself wrong"
        feasible += expected is not None
    assert feasible > 40, "the instances test too little: most have no solution"


@pytest.mark.parametrize("seed", [*range(2), *map(longer, range(2, 4))])
def test_equals_the_table_on_larger_stages(seed: int) -> None:
    """80 stages of up to 40 layers and 12 strategies, with many equal times: a tie resolved wrongly shows here.

    In the longer run 160."""
    rng = np.random.default_rng((1, seed))
    for _ in range(40):
        layers, strategies = int(rng.integers(6, 41)), int(rng.integers(2, 13))
        top_time = int(rng.choice([4, 30, 1000]))
        problem = random_stage(rng, layers, strategies, top_time=top_time, top_memory=int(rng.choice([3, 10])))
        budget = binding_budget(rng, problem)
        table = solve_stage_by_table(problem, budget)
        assert solved_time(problem, budget) == (table.time if table else None)


@pytest.mark.parametrize("seed", [0, longer(1), longer(2)])
def test_equals_the_table_on_long_runs_of_equal_layers(seed: int) -> None:
    """30 stages of up to 70 layers, most of them equal: what treats such layers together must not lose a mixture.

    In the longer run 90."""
    rng = np.random.default_rng((6, seed))
    for _ in range(30):
        layers, strategies = int(rng.integers(24, 71)), int(rng.integers(2, 11))
        top_time = int(rng.choice([4, 30, 100_000]))
        problem = random_stage(rng, layers, strategies, top_time=top_time, top_memory=int(rng.choice([4, 30])))
        others = rng.integers(0, layers, int(rng.integers(0, 5)))
        kinds = np.zeros(layers, dtype=np.int64)
        kinds[others] = rng.integers(0, len(problem.time), len(others))
        problem = replace(problem, kinds=kinds, change=problem.change * int(rng.choice([1, 10])))
        budget = binding_budget(rng, problem)
        table = solve_stage_by_table(problem, budget)
        assert solved_time(problem, budget) == (table.time if table else None)


def test_a_coarser_table_never_beats_the_solver() -> None:
    """Rounding memory up gives plans that fit, so none may be faster than the optimum."""
    rng = np.random.default_rng(2)
    for _ in range(40):
        problem = random_stage(rng, 10, 6, top_memory=50)
        budget = binding_budget(rng, problem)
        optimum = solved_time(problem, budget)
        for quantum in (3, 8):
            for each_transient in (True, False):
                table = solve_stage_by_table(problem, budget, quantum, each_transient=each_transient)
                if table is not None:
                    time, peak = evaluate(problem, table.choice)
                    assert time == table.time
                    assert peak <= budget
                    assert optimum is not None
                    assert optimum <= table.time


@pytest.mark.parametrize("layers", [1, 4, 12])
def test_cutoff_is_exclusive(layers: int) -> None:
    """None at the optimum, the optimum just above it: the outer search relies on both to prove that it is done."""
    rng = np.random.default_rng(layers)
    checked = 0
    for _ in range(60):
        problem = random_stage(rng, layers, strategies=4)
        budget = binding_budget(rng, problem)
        optimum = solve_stage(problem, budget)
        if optimum is None:
            continue
        checked += 1
        assert solve_stage(problem, budget, optimum.time) is None
        again = solve_stage(problem, budget, optimum.time + 1)
        assert again is not None
        assert again.time == optimum.time
    assert checked > 20


def test_the_budget_is_inclusive() -> None:
    """A stage that needs exactly its budget fits; one byte less and it does not."""
    rng = np.random.default_rng(3)
    checked = 0
    for _ in range(60):
        problem = random_stage(rng, layers=4, strategies=3)
        outcomes = [evaluate(problem, choice) for choice in product(range(3), repeat=4)]
        peaks = [peak for time, peak in outcomes if time < NEVER]
        if peaks:
            checked += 1
            assert solved_time(problem, min(peaks)) is not None
            assert solved_time(problem, min(peaks) - 1) is None
    assert checked > 20


def test_a_layer_without_any_strategy_has_no_solution() -> None:
    rng = np.random.default_rng(4)
    problem = random_stage(rng, layers=3, strategies=3)
    time = problem.time.copy()
    time[problem.kinds[1]] = NEVER
    assert solve_stage(replace(problem, time=time), 1000) is None


def test_a_change_that_is_never_possible_is_not_made() -> None:
    """Two layouts with no way between them: one strategy for all layers, however cheap a mixture would be."""
    change = np.array([[[0, NEVER], [NEVER, 0]]])
    problem = StageProblem(
        kinds=np.zeros(3, dtype=np.int64),
        time=np.array([[1, 5]]),
        memory=np.array([[4, 1]]),
        transient=np.zeros((1, 2), dtype=np.int64),
        layout_of=np.array([0, 1]),
        change=change,
        entry=np.zeros(2, dtype=np.int64),
        exit=np.zeros(2, dtype=np.int64),
    )
    assert solved_time(problem, 12) == 3
    assert solved_time(problem, 11) == 15
    assert solved_time(problem, 2) is None


def _steep_stage(rng: np.random.Generator) -> tuple[StageProblem, int]:
    """Strategies a few bytes apart that differ by milliseconds, with assignments only nanoseconds apart."""
    kinds, strategies, layers = int(rng.integers(1, 4)), int(rng.integers(3, 12)), int(rng.integers(8, 30))
    layouts, spread = int(rng.integers(1, strategies + 1)), int(rng.integers(2, 10))
    memory = rng.integers(0, spread, (kinds, strategies))
    problem = StageProblem(
        kinds=rng.integers(0, kinds, layers),
        time=int(10 ** rng.uniform(3, 7)) * (spread - memory) + rng.integers(0, 20, memory.shape),
        memory=memory,
        transient=np.zeros_like(memory),
        layout_of=rng.integers(0, layouts, strategies),
        change=rng.integers(0, 20, (kinds, layouts, layouts)),
        entry=rng.integers(0, 5, layouts),
        exit=rng.integers(0, 5, layouts),
    )
    least, most = int(memory.min(axis=1)[problem.kinds].sum()), int(memory.max(axis=1)[problem.kinds].sum())
    return problem, least + int((most - least) * rng.uniform(0, 0.6))


@pytest.mark.parametrize("trials", [60, longer(600)])
def test_memory_that_every_strategy_needs_changes_nothing(trials: int) -> None:
    """The same bytes on top of each layer, and of the budget, leave the optimum as it was, to the nanosecond.

    Bounds in floating point must not lose an optimum when a byte is worth milliseconds and the budget is gigabytes.
    """
    rng = np.random.default_rng(1)
    differ = []
    for trial in range(trials):
        problem, budget = _steep_stage(rng)
        base = int(10 ** rng.uniform(7, 9.5))
        plain = solved_time(problem, budget)
        lifted = solved_time(replace(problem, memory=problem.memory + base), budget + base * len(problem.kinds))
        if plain != lifted:
            differ.append((trial, plain, lifted))
    assert differ == []


# ------------------------------------------------------------------------------------------ realistic large stages


_MODELS = {
    "bert": [block("encoder", 1280, 512, 16)] * 96,
    "t5": [block("encoder", 1024, 512, 16)] * 48 + [block("decoder", 1024, 256, 16)] * 48,
    "swin": [
        *[block("stage1", 320, 3136, 8)] * 2,
        *[block("stage2", 640, 784, 16)] * 2,
        *[block("stage3", 1280, 196, 32)] * 90,
        *[block("stage4", 2560, 49, 64)] * 2,
    ],
}


def _large_stage(name: str) -> StageProblem:
    """96 layers × 22 strategies on 8 devices, 16 samples; in whole microseconds and MiB, which keep a solver with
    tolerances (and a table over memory) exact."""
    layers = _MODELS[name]
    model = ModelSpec(name=name, family="custom", layers=tuple(layers), training=Training())
    problem = Problem(
        cost=CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON),
        space=Space(name="full", title="", switches=Switches(recompute=True)),
        budget=0,
        batches=(16,),
    )
    stage = stage_of(problem, stage_costs(problem, 1), 16, 1, 1, 0, 0, len(layers))
    assert stage.time.shape[1] == 22
    return in_large_units(stage)


@pytest.mark.parametrize(
    ("name", "budget_gib"),
    [
        ("bert", 2),
        ("bert", 24),
        ("t5", 16),
        pytest.param("swin", 8, marks=pytest.mark.slow),
        pytest.param("swin", 12, marks=pytest.mark.slow),
        ("swin", 20),
    ],
)
def test_equals_an_integer_program_on_96_layers(name: str, budget_gib: int) -> None:
    """Budgets for which HiGHS proves its optimum in seconds, or in minutes; the first has no solution."""
    stage = _large_stage(name)
    budget = budget_gib << 10
    assert solved_time(stage, budget) == least_time_by_milp(stage, budget)


@pytest.mark.parametrize(("name", "budget_gib"), [longer("bert", 8), longer("swin", 8), longer("t5", 10)])
def test_equals_the_table_on_96_layers(name: str, budget_gib: int) -> None:
    """Where HiGHS needs minutes, or more than half an hour (T5), the table, exact in whole MiB, still answers."""
    stage = _large_stage(name)
    budget = budget_gib << 10
    # The table takes a second for each θ, so only a few are left: the transients in steps of 256 MiB.
    stage = replace(stage, transient=rounded_up(stage.transient, 256) * 256)
    table = solve_stage_by_table(stage, budget)
    assert table is not None
    assert solved_time(stage, budget) == table.time
