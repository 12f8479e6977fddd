"""When nothing fits: the smallest budget that does, what else would help, and what no memory would mend."""

from __future__ import annotations

from dataclasses import replace

from galvatron.core.errors import GalvatronError, Infeasible, InvalidInput
from galvatron.core.spec import SWITCHES, Attention, Kind, Level, Precision
from galvatron.core.units import format_bytes
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, default_batch_step, try_plan
from galvatron.planner.search import Feasibility
from galvatron.planner.space import Space

__all__ = ["feasible_batch", "fits", "impossibility", "make_plan", "smallest_budget"]

_TRIED = 256


def feasible_batch(request: Request) -> int | None:
    """The smallest batch of the request that some strategy can divide, given enough memory."""
    return _feasible_batch(request, Feasibility(request.problem()))


def _feasible_batch(request: Request, feasibility: Feasibility) -> int | None:
    return next((batch for batch in request.batches[:_TRIED] if feasibility.can_divide(batch)), None)


def impossibility(request: Request) -> str:
    """Why no amount of memory would help, with the numbers that do not divide."""
    space = request.searched_space
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
    most, least = request.max_micro_batches, request.schedule.least_micro_batches(degree)
    if most is not None and most < least:
        return f"{where} {request.schedule.title} needs at least {least} micro-batches, but at most {most} are allowed"
    data = ", ".join(str(d) for d in sorted({strategy.data_degree for strategy in strategies}))
    return f"{where} no micro-batch can be divided by a data degree of {data}"


def make_plan(request: Request) -> Plan:
    """The best plan, or :class:`Infeasible` with advice."""
    plan = try_plan(request)
    if plan is None:
        raise _explained(request)
    return plan


def smallest_budget(request: Request) -> tuple[int, int] | None:
    """(bytes, batch): the least memory a device needs, for the smallest batch that can be divided at all; None: no
    memory is enough."""
    feasibility = Feasibility(request.problem())
    batch = _feasible_batch(request, feasibility)
    least = None if batch is None else feasibility.least_budget(batch)
    return None if least is None or batch is None else (request.cluster.least_budget(least), batch)


def _explained(request: Request) -> GalvatronError:
    model, cluster = request.model, request.cluster
    devices = f"{cluster.devices} × {cluster.device.name}"
    where = "" if request.space == "full" else f" in space {request.space!r}"
    where += f" within {request.limits}" if request.limits else ""
    least = smallest_budget(request)
    if least is None:
        batch = f"batch: {request.batch}: " if request.batch else ""
        return InvalidInput(f"{batch}{model.name} cannot run on {devices}{where}: {impossibility(request)}")
    needed, batch_size = least
    what = f"{model.name} does not fit on {devices} with {format_bytes(request.budget_bytes)} each{where}"
    if request.batch is not None:
        what += f" at batch {request.batch}"
    if request.budget_bytes <= cluster.reserved_bytes:
        what += f" ({format_bytes(cluster.reserved_bytes)} are reserved before any tensor)"
    return Infeasible(
        f"{what}: the smallest budget that fits is {format_bytes(needed)} ({needed} bytes) at batch {batch_size}.",
        advice=tuple(_remedies(request)),
    )


def _remedies(request: Request) -> list[str]:
    """Single changes under which the same budget is enough, each tried unless it says otherwise."""
    found: list[str] = []
    if request.batch is not None and request.batch > 1:
        smaller = [batch for batch in range(1, request.batch) if request.batch % batch == 0 or batch % 8 == 0]
        feasibility = Feasibility(request.problem())
        for batch in reversed(smaller[-24:]):
            if feasibility.fits(batch):
                found.append(f"a smaller batch: {batch} fits (--batch {batch})")
                break
    switches = request.effective_switches
    for switch in SWITCHES:
        if switch.remedy is None or getattr(switches, switch.name):
            continue
        if fits(replace(request, switches=replace(switches, **{switch.name: True}))):
            found.append(f"{switch.title}: {switch.remedy} (--{switch.option})")
    if request.space != "full" and fits(replace(request, space="full")):
        found.append("the full space of strategies (--space full)")
    if request.limits and fits(replace(request, limits=None)):
        found.append(f"no limits: it fits without {request.limits}")
    for factor in (2, 4, 8, 16, 32):
        larger = _more_devices(request, factor)
        if fits(larger):
            found.append(f"more devices: {larger.cluster.devices} of them fit")
            break
    training = request.model.training
    leaner = []
    if training.precision is not Precision.BF16 and request.cluster.device.bf16_flops_per_s is not None:
        leaner.append("--precision bf16")
    if training.attention is not Attention.FUSED:
        leaner.append("--attention fused")
    if leaner:
        found.append(f"not tried here, but smaller: {', '.join(leaner)}")
    return found


def fits(request: Request) -> bool:
    """Whether some plan fits the budget at the smallest batch that can be divided."""
    feasibility = Feasibility(request.problem())
    batch = _feasible_batch(request, feasibility)
    return batch is not None and feasibility.fits(batch)


def _more_devices(request: Request, factor: int) -> Request:
    """The same request with the outermost level that many times as wide."""
    cluster = request.cluster
    if cluster.levels:
        *inner, outer = cluster.levels
        levels = (*inner, replace(outer, units=outer.units * factor))
    else:
        link = Level(name="link", units=factor, bytes_per_s=1e10, latency_s=1e-5, shared=True)
        levels = (link,)
    larger = replace(cluster, levels=levels)
    step = default_batch_step(larger.devices) if request.batch is None else None
    return replace(request, cluster=larger, batch_step=step)
