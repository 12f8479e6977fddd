"""Stages in which layers borrow a tied weight, against brute force that tries each way in which its owner splits it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from longer import longer
from search_oracles import brute_search, check_plan, limited, random_problem
from tied_oracle import sharers, split_over

from galvatron.core.spec import Kind, TensorParallel
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.search import Problem, least_budget, search


def _tied(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same with a tied last layer, and in half of the cases another one tied as well."""
    *layers, last = problem.cost.model.layers
    size = 2 + int(max(layer.parameters for layer in (*layers, last)) * rng.choice([0.02, 0.2, 2.0]))
    tensor = TensorParallel(forward_collectives=1, backward_collectives=1, message_bytes=last.boundary_bytes)
    layers[0] = replace(layers[0], name="first", replicated_parameters=min(size, layers[0].replicated_parameters))
    layers[0] = replace(layers[0], parameters=size, tied_parameters=0, tensor_parallel=tensor)
    head = replace(last, name="head", parameters=size, tied_parameters=size, replicated_parameters=0)
    head = replace(head, tensor_parallel=tensor if rng.random() < 0.6 else None)
    if len(layers) > 2 and rng.random() < 0.5:
        layers[-1] = replace(head, name="other", forward_flops=last.forward_flops // 2)
    model, cluster = replace(problem.cost.model, layers=(*layers, head)), problem.cost.cluster
    if rng.random() < 0.7:  # communication is cheap
        levels = tuple(replace(level, bytes_per_s=1e13, latency_s=0.0) for level in cluster.levels)
        cluster = replace(cluster, levels=levels)
    return replace(problem, cost=CostModel(model=model, cluster=cluster, conventions=GALVATRON))


@pytest.mark.parametrize("trials", [6, longer(90)])
def test_equals_brute_force_where_weights_are_tied(trials: int) -> None:
    """What a later user pays depends on another layer's strategy. Some plans avoid to split anew, some pay for it."""
    avoided = paid = pipelined = 0
    for trial in range(trials):
        rng = np.random.default_rng((18, trial))
        free = _tied(random_problem(rng, most_work=150), rng)
        free = replace(free, space=replace(free.space, kinds=frozenset({Kind.DP, Kind.TP})))
        problem = limited(rng, free)
        expected, optimum = brute_search(problem), search(problem)
        found = Fraction(optimum.batch, optimum.solved.iteration_ns) if optimum else 0
        assert found == (Fraction(expected.batch, expected.iteration_ns) if expected else 0), trial
        least = least_budget(problem) if trial % 3 == 0 else None
        if least is not None:
            assert search(replace(problem, budget=least)) is not None, trial
            assert brute_search(replace(problem, budget=least - 1)) is None, trial
        if optimum is None:
            continue
        check_plan(problem, optimum)
        for stage, (begin, end) in enumerate(pairwise(optimum.solved.positions)):
            sharing = sharers(problem, begin, end)
            if len(sharing) > 1:
                layers = problem.cost.model.layers
                ways = [split_over(layers[place], optimum.strategies[stage][place - begin]) for place in sharing]
                avoided, paid = avoided + (len(set(ways)) == 1), paid + (len(set(ways)) > 1)
                pipelined += optimum.pipeline_degree > 1
    assert min(avoided, paid, pipelined) >= trials // 18, f"too few instances: {avoided}, {paid}, {pipelined}"
