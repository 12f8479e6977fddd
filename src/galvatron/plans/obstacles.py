"""What makes a request impossible whatever the memory: heads, layers, micro-batches or a batch that do not divide."""

from __future__ import annotations

from dataclasses import replace

from galvatron.cost import Schedule
from galvatron.plans.planner import Request
from galvatron.search import least_budget
from galvatron.space import Space, space_named
from galvatron.spec import Kind

__all__ = ["feasible_batch", "impossibility"]

_TRIED = 256


def feasible_batch(request: Request) -> int | None:
    """The smallest batch of the request that some strategy can divide, given enough memory."""
    problem = request.problem()
    for batch in request.batches[:_TRIED]:
        if least_budget(replace(problem, batches=(batch,))) is not None:
            return batch
    return None


def impossibility(request: Request) -> str:
    """Why no amount of memory would help, with the numbers that do not divide."""
    space = space_named(request.space, request.effective_switches)
    reasons = [_stuck(request, space, degree) for degree in space.pipeline_degrees(request.cluster.devices)]
    return "; ".join(reasons[:3])


def _stuck(request: Request, space: Space, degree: int) -> str:
    """What is in the way of one pipeline degree."""
    model = request.model
    where = f"with {degree} stage{'s' if degree > 1 else ''}"
    if degree > len(model.layers):
        return f"{where} there are more stages than the model's {len(model.layers)} layers"
    strategies = space.strategies(request.cluster.devices // degree)
    tensor_degrees = sorted({strategy.degree(Kind.TP) for strategy in strategies})
    if tensor_degrees[0] > 1 and not model.splittable:
        return f"{where} every strategy has TP, which can split none of the model's layers"
    for kind in model.kinds:
        if kind.tensor_parallel and not any(kind.allows_tensor_parallel(t) for t in tensor_degrees):
            heads, degrees = (
                ", ".join(map(str, numbers)) for numbers in (kind.tensor_parallel.divides, tensor_degrees)
            )
            return f"{where} a TP degree of {degrees} does not divide the heads of {kind.name!r} ({heads})"
    most = request.max_micro_batches
    if request.schedule is Schedule.ONE_F_ONE_B and degree > 1 and most is not None and most < degree:
        return f"{where} 1F1B needs at least {degree} micro-batches, but at most {most} are allowed"
    data = ", ".join(str(d) for d in sorted({strategy.data_degree for strategy in strategies}))
    return f"{where} no micro-batch can be divided by a data degree of {data}"
