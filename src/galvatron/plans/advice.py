"""When nothing fits: the smallest budget that does, and what else would help."""

from __future__ import annotations

from dataclasses import replace

from galvatron.errors import Infeasible
from galvatron.plans.plan import Plan
from galvatron.plans.planner import Request, default_batch_step, try_plan
from galvatron.search import search
from galvatron.spec import Attention, Level, Precision
from galvatron.units import MIB, format_bytes

__all__ = ["make_plan", "smallest_budget"]


def make_plan(request: Request) -> Plan:
    """The best plan, or :class:`Infeasible` with advice."""
    plan = try_plan(request)
    if plan is None:
        raise _explained(request)
    return plan


def smallest_budget(request: Request) -> int | None:
    """The least memory a device needs for any plan of the request to fit, to a MiB; None: no memory is enough.

    Batches are tried smallest first, because less fits with more samples.
    """
    problem = replace(request.problem(), batches=request.batches[:1])
    high = 1
    while search(replace(problem, budget=high * MIB)) is None:
        high *= 4
        if high * MIB > 1 << 43:
            return None
    low = high // 4
    while high - low > 1:
        middle = (low + high) // 2
        if search(replace(problem, budget=middle * MIB)) is None:
            low = middle
        else:
            high = middle
    return high * MIB + request.cluster.reserved_bytes


def _explained(request: Request) -> Infeasible:
    model, cluster = request.model, request.cluster
    devices = f"{cluster.devices} × {cluster.device.name}"
    what = f"{model.name} does not fit on {devices} with {format_bytes(request.budget_bytes)} each"
    if request.batch is not None:
        what += f" at batch {request.batch}"
    if request.space != "full":
        what += f" in space {request.space!r}"
    least = smallest_budget(request)
    if least is None:
        return Infeasible(
            f"{what}: no amount of memory helps, because no strategy divides this batch and these layers evenly.",
            advice=("use a batch that the data degrees and micro-batches divide, such as a multiple of the devices",),
        )
    batch = request.batch or request.batches[0]
    return Infeasible(
        f"{what}: the smallest budget that fits is {format_bytes(least)} ({least} bytes) at batch {batch}.",
        advice=tuple(_remedies(request)),
    )


def _remedies(request: Request) -> list[str]:
    """Single changes under which the same budget is enough, each tried unless it says otherwise."""
    found: list[str] = []
    if request.batch is not None and request.batch > 1:
        smaller = [batch for batch in range(1, request.batch) if request.batch % batch == 0 or batch % 8 == 0]
        for batch in reversed(smaller[-24:]):
            if search(replace(request, batch=batch).problem()) is not None:
                found.append(f"a smaller batch: {batch} fits (--batch {batch})")
                break
    switches = request.effective_switches
    if not switches.recompute and _fits(replace(request, switches=replace(switches, recompute=True))):
        found.append("recompute: keep only each layer's input and run forward again (--recompute)")
    if request.space != "full" and _fits(replace(request, space="full")):
        found.append("the full space of strategies (--space full)")
    for factor in (2, 4, 8, 16, 32):
        larger = _more_devices(request, factor)
        if _fits(larger):
            found.append(f"more devices: {larger.cluster.devices} of them fit")
            break
    training = request.model.training
    leaner = []
    if training.precision is Precision.FP32 and request.cluster.device.bf16_flops_per_s is not None:
        leaner.append("--precision bf16")
    if training.attention is not Attention.FUSED:
        leaner.append("--attention fused")
    if leaner:
        found.append(f"not tried here, but smaller: {', '.join(leaner)}")
    return found


def _fits(request: Request) -> bool:
    problem = request.problem()
    return search(replace(problem, batches=problem.batches[:1])) is not None


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
