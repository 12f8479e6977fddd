"""Context parallelism in the search: brute force and an integer program agree with it.

What would break: an axis priced as another, a layout taken for one that divides the same ranks in another order, a
layer given what its heads or tokens cannot take.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from longer import longer
from search_oracles import (
    as_brute_force,
    limited,
    random_expert_problem,
    random_problem,
    stage_costs,
    stage_of,
)
from stage_program import CLUSTER, block, in_large_units, least_time_by_milp

from galvatron.core.spec import Context, Kind, LayerSpec, ModelSpec, Training
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.search import Problem
from galvatron.planner.search.stage import solve_stage
from galvatron.planner.space import Space, Switches

Rng = np.random.Generator
_KINDS = [{Kind.SDP}, {Kind.SDP, Kind.TP}, {Kind.SDP, Kind.TP}, {Kind.DP, Kind.TP}, {Kind.DP, Kind.SDP}, {Kind.TP}]


def _with_context(rng: Rng, problem: Problem, *, orders: bool = False) -> Problem:
    """The same problem with sequences that most layers can divide, and a space that does; ``orders``: of axes, each."""

    length = int(rng.choice([16, 48, 48, 96, 12]))

    def context(layer: LayerSpec) -> Context | None:
        draw = rng.random()
        if draw < 0.06:
            return None
        if draw < 0.3:
            return Context(length=length)
        heads, key_value = [(8, 8), (24, 8), (8, 2), (6, 3)][int(rng.integers(4))]
        return Context(
            length=length,
            heads=heads,
            key_value_heads=key_value,
            causal=bool(rng.random() < 0.7),
            ring=bool(rng.random() < 0.7),
            attention_flops=int(layer.forward_flops * rng.uniform(0.1, 1.0)),
            query_bytes=int(layer.boundary_bytes * rng.choice([1.0, 0.05])),
            key_value_bytes=int(layer.boundary_bytes * rng.choice([2.0, 0.5, 0.05])),
        )

    light = float(rng.choice([1.0, 0.02]))  # to move, so that layers may differ
    heavy = int(rng.choice([1, 30]))  # states, so that sharding them may be needed
    kinds = {
        kind.name: replace(
            kind,
            context=context(kind),
            boundary_bytes=int(light * kind.boundary_bytes),
            **{
                f"{part}parameters": heavy * getattr(kind, f"{part}parameters") for part in ("", "tied_", "replicated_")
            },
        )
        for kind in problem.cost.model.kinds
    }
    model = replace(problem.cost.model, layers=tuple(kinds[layer.name] for layer in problem.cost.model.layers))
    flags = [bool(rng.random() < 0.4) for _ in range(4)]
    space = Space(
        name="context",
        title="",
        kinds=frozenset({*_KINDS[int(rng.integers(len(_KINDS)))], Kind.RING, Kind.ULYSSES}),
        pipeline="none" if rng.random() < 0.5 else "any",
        switches=Switches(
            context_parallel=True,
            context_orders=orders,
            recompute=flags[0],
            sequence_parallel=flags[1],
            zero2=flags[2] and flags[3],
            zero3=True,
        ),
    )
    batches = [(1,), (2,), (1, 2, 4), (2, 8)][int(rng.integers(4))]  # few samples: dividing them alone is not enough
    return replace(problem, cost=replace(problem.cost, model=model), space=space, batches=batches)


def _problems(trials: int) -> list[tuple[int, Problem]]:
    found = []
    for trial in range(trials):
        rng = np.random.default_rng((41, trial))
        problem = _with_context(rng, random_problem(rng, most_work=120), orders=trial % 2 == 1)
        devices = problem.cost.cluster.devices
        most = max(
            len(problem.space.strategies(devices // degree)) for degree in problem.space.pipeline_degrees(devices)
        )
        if most <= 40:
            found.append((trial, limited(rng, problem, least=0.4)))
    return found


@pytest.mark.parametrize("trials", [45, longer(400)])
def test_equals_brute_force(trials: int) -> None:
    """Models whose layers divide sequences, divide tokens alone, or divide nothing, beside each other."""
    feasible, mixed, used = 0, 0, set()
    for trial, problem in _problems(trials):
        optimum = as_brute_force(problem)
        if optimum is None:
            continue
        feasible += 1
        chosen = [own for stage in optimum.strategies for own in stage]
        for layer, own in zip(problem.cost.model.layers, chosen, strict=True):
            assert layer.allows_context(own), trial
        used |= {str(axis.kind) for own in chosen for axis in own.axes}
        used |= {"both"} if any(own.degree(Kind.RING) > 1 < own.degree(Kind.ULYSSES) for own in chosen) else set()
        used |= {"zero3"} if any(own.zero3 for own in chosen) else set()
        mixed += any(len({own.layout for own in stage}) > 1 for stage in optimum.strategies)
    assert feasible >= trials // 3
    assert mixed >= trials // 16, "layers seldom divide differently, so the comparison proves little"
    assert used >= {"ring", "ulysses", "tp", "both", "zero3"}, used


@pytest.mark.parametrize("trials", [20, longer(300)])
def test_equals_brute_force_beside_experts(trials: int) -> None:
    """Experts with axes of their own in layers whose sequences are divided."""
    feasible = together = 0
    for trial in range(trials):
        rng = np.random.default_rng((43, trial))
        problem = _with_context(rng, random_expert_problem(rng, most_work=1200))
        switches = replace(problem.space.switches, expert_parallel=True)
        space = replace(problem.space, kinds=problem.space.kinds | {Kind.EP}, switches=switches)
        problem = replace(problem, space=space)
        devices = problem.cost.cluster.devices
        stages = [devices // degree for degree in space.pipeline_degrees(devices)]
        if max(len(space.strategies(each, experts=True)) for each in stages) > 200:
            continue
        problem = limited(rng, problem, least=0.5)
        optimum = as_brute_force(problem)
        if optimum is None:
            continue
        feasible += 1
        chosen = [own for stage in optimum.strategies for own in stage]
        together += any(own.experts and own.context_degree > 1 for own in chosen)
    assert feasible >= trials // 8
    assert together >= trials // 20, "experts beside divided sequences are seldom best, so this proves little"


_LONG = replace(
    block("block", 1024, 8192, 16),
    context=Context(
        length=8192,
        heads=16,
        key_value_heads=4,
        attention_flops=4 * 8192 * 8192 * 1024,
        query_bytes=4 * 8192 * 1024,
        key_value_bytes=2 * 8192 * 1024,
    ),
    forward_flops=24 * 8192 * 1024**2 + 4 * 8192 * 8192 * 1024,
)
_HEAD = replace(block("head", 1024, 8192, 16), context=Context(length=8192))


@pytest.mark.parametrize("budget_gib", [3, longer(2), longer(6)])
def test_equals_an_integer_program(budget_gib: int) -> None:
    """23 blocks and a head on 8 devices, two samples: SDP, Ring and Ulysses in every mixture."""
    model = ModelSpec(name="blocks", family="custom", layers=(*[_LONG] * 23, _HEAD), training=Training())
    cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
    switches = Switches(context_parallel=True, recompute=True, zero3=True)
    space = Space(name="long", title="", kinds=frozenset({Kind.SDP, Kind.RING, Kind.ULYSSES}), switches=switches)
    problem = Problem(cost=cost, space=space, budget=0, batches=(2,))
    stage = in_large_units(stage_of(problem, stage_costs(problem, 1), 2, 1, 1, 0, 0, 24))
    solution = solve_stage(stage, budget_gib << 10)
    assert (solution and solution.time) == least_time_by_milp(stage, budget_gib << 10)
    assert solution is not None
