"""Grades of recompute and offload in the search: brute force and an integer program agree with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from longer import longer
from search_oracles import as_brute_force, limited, random_problem, stage_costs, stage_of
from stage_program import CLUSTER, block, in_large_units, least_time_by_milp

from galvatron.core.spec import Kept, LayerSpec, ModelSpec, Strategy, Training
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.search import Problem
from galvatron.planner.search.stage import solve_stage
from galvatron.planner.space import Switches, space_named

Rng = np.random.Generator
_GRADES = ("recompute", "selective_recompute", "recompute_but_attention", "offload")


def _with_grades(rng: Rng, problem: Problem) -> Problem:
    """The same problem with results that layers can keep, a link to the host, and some grades to choose from."""

    def kept(layer: LayerSpec, share: float) -> Kept:
        size = int(share * layer.activation_bytes)
        return Kept(
            split_bytes=size // 2,
            replicated_bytes=size // 4,
            sent_bytes=size // 8,
            flops=int(layer.forward_flops * rng.uniform(0, 0.9)),
        )

    kinds = {
        kind.name: replace(
            kind, selective=kept(kind, 0.5), but_attention=kept(kind, 0.1) if rng.random() < 0.7 else None
        )
        for kind in problem.cost.model.kinds
    }
    model = replace(problem.cost.model, layers=tuple(kinds[layer.name] for layer in problem.cost.model.layers))
    cluster = problem.cost.cluster
    device = replace(
        cluster.device,
        host_bytes_per_s=10.0 ** rng.uniform(7, 11),
        host_memory_bytes=int(model.activation_bytes * rng.choice([1, 4, 100])),
    )
    flags = {name: bool(rng.random() < 0.6) for name in _GRADES}
    return replace(
        problem,
        cost=replace(problem.cost, model=model, cluster=replace(cluster, device=device)),
        space=replace(problem.space, switches=replace(problem.space.switches, **flags)),
    )


@pytest.mark.parametrize("trials", [18, longer(300)])
def test_equals_brute_force(trials: int) -> None:
    feasible, used = 0, set()
    for trial in range(trials):
        rng = np.random.default_rng((31, trial))
        problem = limited(rng, _with_grades(rng, random_problem(rng, most_work=120)))
        optimum = as_brute_force(problem)
        if optimum is None:
            continue
        feasible += 1
        used |= {name for stage in optimum.strategies for own in stage for name in _GRADES if getattr(own, name)}
    assert feasible >= trials // 2
    assert used == set(_GRADES), "the instances test too little: some grade is never taken"


_BLOCK = replace(
    block("block", 1024, 512, 16),
    selective=Kept(split_bytes=12 << 20, replicated_bytes=2 << 20, flops=0),
    but_attention=Kept(split_bytes=2 << 20, sent_bytes=2 << 20, flops=10**10),
)


@pytest.mark.parametrize("budget_gib", [4, longer(3), longer(6)])
def test_equals_an_integer_program(budget_gib: int) -> None:
    """48 blocks on 8 devices; whatever is on, one grade a layer."""
    model = ModelSpec(name="blocks", family="custom", layers=(_BLOCK,) * 48, training=Training())
    device = replace(CLUSTER.device, host_bytes_per_s=12e9, host_memory_bytes=64 << 30)
    cost = CostModel(model=model, cluster=replace(CLUSTER, device=device), conventions=GALVATRON)
    space = space_named("sdp", Switches(**dict.fromkeys(_GRADES, True)))
    problem = Problem(cost=cost, space=space, budget=0, batches=(64,))
    stage = in_large_units(stage_of(problem, stage_costs(problem, 1), 64, 1, 1, 0, 0, 48))
    assert stage.time.shape[1] == 5
    solution = solve_stage(stage, budget_gib << 10)
    assert (solution and solution.time) == least_time_by_milp(stage, budget_gib << 10)


def test_a_layer_has_one_grade() -> None:
    switches = Switches(**dict.fromkeys(_GRADES, True))
    flags = [str(each).partition("+")[2] for each in space_named("dp", switches).strategies(4)]
    assert sorted(flags) == ["", "host", "ra", "rc", "rs"]
    assert Strategy.parse("dp4+rs").selective_recompute
