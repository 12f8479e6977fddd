"""When nothing fits: the smallest budget that does, what else would help, and what no memory would mend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from galvatron.core.errors import GalvatronError, Infeasible, InvalidInput
from galvatron.core.spec import OPTIMIZERS, SWITCHES, Attention, Kind, Level, ModelSpec, Precision, optimizer_named
from galvatron.core.spec.tuning import Lora, Tuning
from galvatron.core.units import format_bytes, format_seconds
from galvatron.families import load_model
from galvatron.planner.cost import NEVER
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, default_batch_step, try_plan
from galvatron.planner.plan.reasons import why_not
from galvatron.planner.search import Feasibility, Tell, most_micro_batches
from galvatron.planner.space import Space

__all__ = [
    "feasible_batch", "fits", "impossibility", "make_plan", "remedies", "smallest_budget", "with_adapters",
]  # fmt: skip

_TRIED = 256
_PRICING_S = 0.5
"""Processor time after which advice is not priced any more, and only says that it fits."""
_FEW_TIMES = 4
"""With more than so many times the devices a plan takes long to find."""
_LEAST_TOKENS = 128
_RANK = 16
"""Of the adapters that are advised."""


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
    most = most_micro_batches(request.max_micro_batches, request.stages_a_micro_batch, degree)
    least = request.schedule.least_micro_batches(degree)
    if most is not None and most < least:
        return f"{where} {request.schedule.title} needs at least {least} micro-batches, but at most {most} are allowed"
    largest = max(request.batches)
    if largest < least:
        samples = f"{largest} sample{'s' if largest > 1 else ''}"
        return f"{where} {request.schedule.title} needs at least {least} micro-batches, but a batch has {samples}"
    pins = dict(request.pins)
    possible = {
        kind.name: sorted(
            {own.data_degree for own in strategies if pins.get(kind.name, own) == own and not why_not(model, kind, own)}
        )
        for kind in model.kinds
    }
    for name, data in possible.items():
        if not data:
            return f"{where} no strategy can run layers {name!r}{' as pinned' if name in pins else ''}"
        if not any(_divides(each, request, least) for each in data):
            said = ", ".join(map(str, data))
            return f"{where} no micro-batch can be divided by a data degree of {said}, as layers {name!r} must have"
    return f"{where} no micro-batch can be divided by the data degrees that its layers can have"


def _divides(data: int, request: Request, least: int) -> bool:
    """Whether some batch has so many micro-batches, or more, that a data degree divides."""
    most = request.limits.max_micro_batch if request.limits else None
    batches = request.batches[:_TRIED] if most is None or data <= most else ()
    return any(batch % data == 0 and batch // data >= least for batch in batches)


def make_plan(request: Request, tell: Tell | None = None, *, advised: bool = True) -> Plan:
    """The best plan, or :class:`Infeasible`, with advice unless that is to be asked for later (:func:`remedies`).
    ``tell`` hears of a search that takes more than a second."""
    plan = try_plan(request, tell)
    if plan is None:
        raise _explained(request, advised=advised)
    return plan


def smallest_budget(request: Request) -> tuple[int, int] | None:
    """(bytes, batch): the least memory a device needs, for the smallest batch that can be divided at all; None: no
    memory is enough."""
    feasibility = Feasibility(request.problem())
    batch = _feasible_batch(request, feasibility)
    least = None if batch is None else feasibility.least_budget(batch)
    return None if least is None or batch is None else (request.cluster.least_budget(least), batch)


def _explained(request: Request, *, advised: bool) -> GalvatronError:
    request = replace(request, time_limit_s=None)  # it is for the search, which is done
    model, cluster = request.model, request.cluster
    devices = f"{cluster.devices} × {cluster.device.name}"
    where = "" if request.space == "full" else f" in space {request.space!r}"
    where += f" within {request.limits}" if request.limits else ""
    least = smallest_budget(request)
    if (feasible_batch(request) is not None) if least is None else least[0] <= request.budget_bytes:
        return InvalidInput(
            f"{model.name} on {devices}{where}: every plan takes over {format_seconds(NEVER / 1e9)} for a micro-batch "
            f"in a stage, or {format_bytes(NEVER)} of memory, which is beyond what is planned; check the figures of "
            "layers and cluster"
        )
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
        advice=remedies(request) if advised else (),
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """One thing that a user could do otherwise."""

    what: str
    option: str
    request: Request
    exact: bool = True
    """Whether the request is that of the option itself."""
    quick: bool = True
    """Whether a plan for it is soon found."""


def _change(
    what: str, option: str, request: Request, *, exact: bool = True, quick: bool = True, **changes: Any
) -> Iterator[_Change]:
    """One, or none where it does not go with the request's limits: a pin names a layer that adapters rename."""
    with suppress(InvalidInput):
        yield _Change(what, option, replace(request, **changes), exact, quick)


def remedies(request: Request) -> tuple[str, ...]:
    """Single changes under which the same budget is enough, each tried and, while that is quick, priced: what changes
    nothing about the training first, then what changes the samples, what is trained, and what is paid for."""
    deadline = time.process_time() + _PRICING_S
    found = [_priced(change, deadline) for group in _changes(request) for change in _first_fitting(group)]
    if request.model.training.attention is not Attention.FUSED:
        found.append("not tried here, but smaller: --attention fused")
    return tuple(found)


def _changes(request: Request) -> Iterator[Iterator[_Change]]:
    """Groups of changes; of each the first that fits is told."""
    if request.batch is not None and request.batch > 1:
        smaller = [batch for batch in range(1, request.batch) if request.batch % batch == 0 or batch % 8 == 0]
        yield (
            change
            for batch in reversed(smaller[-24:])
            for change in _change(f"a smaller batch, {batch}", f"--batch {batch}", request, batch=batch)
        )
    switches = request.effective_switches
    for switch in SWITCHES:
        if switch.remedy is not None and not getattr(switches, switch.name):
            also = {"zero3": True} if switch.name == "context_parallel" else {}
            on = replace(switches, **{switch.name: True}, **also)
            yield _change(f"{switch.title}: {switch.remedy}", f"--{switch.option}", request, switches=on)
    if request.space != "full":
        yield _change("the full space of strategies", "--space full", request, space="full")
    if request.limits:
        yield _change(f"without the limits {request.limits}", "", request, limits=None)
    model, training = request.model, request.model.training
    if training.precision is not Precision.BF16 and request.cluster.device.bf16_flops_per_s is not None:
        yield _retrained(request, "bf16", "--precision bf16", precision=Precision.BF16)
    yield _leaner_states(request)
    if training.sequence_length is not None and not training.tunes:
        yield (
            change
            for part in (2, 4, 8, 16)
            for tokens in [training.sequence_length // part]
            if tokens >= _LEAST_TOKENS
            for change in _retrained(
                request, f"{tokens} tokens a sample", f"--sequence-length {tokens}", sequence_length=tokens
            )
        )
    if model.config is not None and not training.tunes:
        what, option = "low-rank adapters, all else frozen", f"--lora {_RANK}"
        yield _change(what, option, request, exact=False, model=with_adapters(model, _RANK), profile=None)
    yield (
        change
        for factor in (2, 4, 8, 16, 32)
        for larger in [_more_devices(request, factor)]
        for change in _change(
            f"more devices, {larger['cluster'].devices}", "", request, quick=factor <= _FEW_TIMES, **larger
        )
    )


def _leaner_states(request: Request) -> Iterator[_Change]:
    """The same optimizer with smaller states, where there is one."""
    training = request.model.training
    now = optimizer_named(training.optimizer)
    for other in OPTIMIZERS:
        if other.name.startswith(now.name) and other.state_bytes < now.state_bytes:
            model = replace(request.model, training=replace(training, optimizer=other.name))
            yield from _change("smaller optimizer states", f"--optimizer {other.name}", request, model=model)


def with_adapters(model: ModelSpec, rank: int) -> ModelSpec:
    """About what ``--lora`` makes of it, counted without the model itself: a product of the hidden size with as much,
    or more, has at most this many parameters in its adapter."""
    bytes_of = model.training.precision.bytes
    blocks = [index for index, layer in enumerate(model.layers) if model.layers.count(layer) > 1]
    first = min(blocks, default=0)
    layers = []
    for index, layer in enumerate(model.layers):
        tokens = model.training.sequence_length or 1
        hidden = max(1, layer.boundary_bytes // bytes_of // tokens)
        experts = 0 if layer.experts is None else layer.experts.parameters
        count = 2 * rank * (layer.parameters - experts) // hidden if index in blocks else 0
        own = Tuning(
            frozen_parameters=layer.parameters,
            frozen_replicated_parameters=layer.replicated_parameters if layer.tensor_parallel else 0,
            frozen_tied_parameters=layer.tied_parameters,
            frozen_expert_parameters=experts,
            backward=index >= first,
            adapter_parameters=count,
            adapter_replicated_parameters=count // 2 if layer.tensor_parallel else 0,
            adapter_flops=2 * tokens * count,
            adapter_activation_bytes=tokens * bytes_of * rank * 7 if count else 0,
        )
        layers.append(layer.tuned(own, f"{layer.name}+{'lora' if count else 'frozen'}"))
    lora = Lora(rank=rank, alpha=2.0 * rank)
    return replace(model, layers=tuple(layers), training=replace(model.training, lora=lora))


def _retrained(request: Request, what: str, option: str, **changes: Any) -> Iterator[_Change]:
    """The model trained otherwise, where its layers can be counted anew without torch."""
    model = request.model
    if model.config is None or model.training.tunes:
        return
    try:
        changed = load_model(dict(model.config), replace(model.training, **changes))
    except GalvatronError:
        return
    training = replace(changed.training, optimizer=model.training.optimizer, compile=model.training.compile)
    changed = replace(changed, name=model.name, training=training)
    yield from _change(what, option, request, model=changed, profile=None)


def _first_fitting(changes: Iterator[_Change]) -> Iterator[_Change]:
    for change in changes:
        if fits(change.request):
            yield change
            return


def _priced(change: _Change, deadline: float) -> str:
    left_s = deadline - time.process_time()
    plan = None
    if change.quick and left_s > 0:
        with suppress(InvalidInput):  # no plan was found so soon
            plan = try_plan(replace(change.request, time_limit_s=left_s))
    price = "fits"
    if plan is not None and plan.certificate is not None:
        least = "" if plan.certificate.gap == 0 else "at least "
        about = "" if change.exact else "about "
        price = f"{least}{about}{plan.throughput:.3g} samples/s at batch {plan.batch}"
    return f"{change.what}: {price}{f' ({change.option})' if change.option else ''}"


def fits(request: Request) -> bool:
    """Whether some plan fits the budget at the smallest batch that can be divided."""
    feasibility = Feasibility(request.problem())
    batch = _feasible_batch(request, feasibility)
    return batch is not None and feasibility.fits(batch)


def _more_devices(request: Request, factor: int) -> dict[str, Any]:
    """What the request has otherwise with the outermost level that many times as wide."""
    cluster = request.cluster
    if cluster.levels:
        *inner, outer = cluster.levels
        levels = (*inner, replace(outer, units=outer.units * factor))
    else:
        link = Level(name="link", units=factor, bytes_per_s=1e10, latency_s=1e-5, shared=True)
        levels = (link,)
    larger = replace(cluster, levels=levels)
    step = default_batch_step(larger.devices) if request.batch is None else None
    return {"cluster": larger, "batch_step": step}
