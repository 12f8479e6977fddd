"""Large stages of realistic layers, and an integer program (HiGHS) that answers for them: an oracle for the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from search_oracles import evaluate

from galvatron.core.spec import Cluster, Device, LayerSpec, Level, TensorParallel
from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search import StageProblem

CLUSTER = Cluster(
    name="pcie-8",
    device=Device(
        name="device",
        memory_bytes=24 << 30,
        memory_bytes_per_s=5e11,
        fp32_flops_per_s=8e12,
        layer_overhead_s=1e-4,
    ),
    levels=(Level(name="pcie", units=8, bytes_per_s=8e9, latency_s=2e-5, shared=True),),
    reserved_bytes=1 << 30,
    overlap_slowdown=1.3,
)


def block(name: str, hidden: int, tokens: int, heads: int) -> LayerSpec:
    """A Transformer block."""
    return LayerSpec(
        name=name,
        parameters=12 * hidden * hidden + 13 * hidden,
        replicated_parameters=9 * hidden,
        forward_flops=24 * tokens * hidden * hidden,
        split_activation_bytes=48 * tokens * hidden,
        replicated_activation_bytes=16 * tokens * hidden,
        boundary_bytes=4 * tokens * hidden,
        transient_bytes=32 * tokens * hidden,
        tensor_parallel=TensorParallel(
            divides=(heads,), forward_collectives=2, backward_collectives=2, message_bytes=4 * tokens * hidden
        ),
    )


def in_large_units(stage: StageProblem) -> StageProblem:
    """In whole microseconds and MiB, which keep a solver with tolerances exact."""
    return replace(
        stage,
        time=np.where(stage.time < NEVER, rounded_up(stage.time, 1000), NEVER),
        memory=rounded_up(stage.memory, 1 << 20),
        transient=rounded_up(stage.transient, 1 << 20),
        change=rounded_up(stage.change, 1000),
    )


def rounded_up(values: Integers, unit: int) -> Integers:
    """Up to whole units."""
    rounded: Integers = -(-values // unit)
    return rounded


def least_time_by_milp(problem: StageProblem, budget: int) -> int | None:
    """The same problem as an integer program for HiGHS.

    x[l, s] chooses strategies, f[l, a, b] is the flow from layout a to b after layer l, θ the largest transient.
    """
    layers, strategies, layouts = len(problem.kinds), problem.time.shape[1], problem.change.shape[1]
    usable = problem.time[problem.kinds] < NEVER
    layer_cost = np.where(usable, problem.time[problem.kinds], 0)
    layer_cost[0] += problem.entry[problem.layout_of]
    layer_cost[-1] += problem.exit[problem.layout_of]
    cost = np.concatenate([layer_cost.ravel(), problem.change[problem.kinds[:-1]].ravel(), [0]])
    flows = (layers - 1) * layouts**2

    member = np.zeros((layouts, strategies))
    member[problem.layout_of, np.arange(strategies)] = 1
    one_each = sparse.kron(sparse.eye(layers), np.ones((1, strategies)))
    leaving = sparse.kron(sparse.eye(layers - 1), np.kron(np.eye(layouts), np.ones((1, layouts))))
    entering = sparse.kron(sparse.eye(layers - 1), np.kron(np.ones((1, layouts)), np.eye(layouts)))
    transients = sparse.block_diag([row[None] for row in problem.transient[problem.kinds]])
    memory = problem.memory[problem.kinds].reshape(1, -1)

    def rows(x: object, f: object | None, theta: float) -> object:
        height = x.shape[0]  # type: ignore[attr-defined]
        blank = sparse.csr_matrix((height, flows))
        return sparse.hstack([x, blank if f is None else f, np.full((height, 1), theta)]).tocsr()

    constraints = [
        LinearConstraint(rows(one_each, None, 0), 1, 1),
        LinearConstraint(rows(sparse.kron(sparse.eye(layers - 1, layers), -member), leaving, 0), 0, 0),
        LinearConstraint(rows(sparse.kron(sparse.eye(layers - 1, layers, k=1), -member), entering, 0), 0, 0),
        LinearConstraint(rows(transients, None, -1), -np.inf, 0),
        LinearConstraint(rows(memory, None, 1), -np.inf, budget),
    ]
    upper = np.concatenate([usable.ravel(), np.ones(flows), [np.inf]])
    integral = np.concatenate([np.ones(usable.size), np.zeros(flows + 1)])
    options = {"mip_rel_gap": 0.0}
    result = milp(cost, integrality=integral, bounds=Bounds(0, upper), constraints=constraints, options=options)
    if result.status == 2:  # infeasible
        return None
    assert result.status == 0, result.message
    chosen = np.asarray(result.x[: usable.size]).reshape(usable.shape).argmax(axis=1)
    time, peak = evaluate(problem, chosen.tolist())
    assert peak <= budget
    assert abs(time - result.fun) < 0.01
    return time
