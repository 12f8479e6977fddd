"""What people ask besides "which plan": how long and how much for so many tokens, how few devices, which cluster."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron.core.errors import GalvatronError, Infeasible, InvalidInput
from galvatron.core.spec import Kind
from galvatron.core.spec.limits import Limits
from galvatron.planner.plan.advice import fits, make_plan
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, default_batch_step, try_plan
from galvatron.planner.search import Tell

__all__ = ["Answer", "Offer", "Sort", "answer", "fewest_devices", "offers", "sort_of", "top_plans"]

_HOUR_S, _DAY_S = 3600.0, 86400.0
_ALL_COUNTS = 64
"""On a cluster of at most so many devices every number of them is tried; on a larger one those that divide it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan in terms of time and money. None: it cannot be known from what was said."""

    tokens_per_s: float | None
    """None: the model's samples are not tokens."""
    tokens: float | None
    """How many were asked about."""
    seconds: float | None
    device_hours: float | None
    cost: float | None
    energy_kwh: float | None
    samples_per_price: float | None
    """For one unit of the price's currency."""

    @property
    def days(self) -> float | None:
        return None if self.seconds is None else self.seconds / _DAY_S


def answer(plan: Plan, tokens: float | None = None, price_per_hour: float | None = None) -> Answer:
    """What a plan means for so many tokens. The price and power of a device are the cluster's, unless a price is given.

    All of it follows from the predicted throughput: no failures, no evaluation, no checkpoints.
    """
    if tokens is not None and not 0 < tokens < math.inf:
        raise InvalidInput(f"tokens: {tokens:g} given; expected a number above 0, such as 1e12")
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise InvalidInput(f"price: {price_per_hour:g} given; expected what an hour of one device costs, such as 2.5")
    device, devices = plan.cluster.facts.device, plan.cluster.devices
    length = plan.model.training.sequence_length
    if tokens is not None and length is None:
        raise InvalidInput(
            f"tokens: {tokens:g} given, but the samples of {plan.model.name} have no number of tokens; give "
            "--sequence-length, or leave --tokens out"
        )
    price = device.price_per_hour if price_per_hour is None else price_per_hour
    per_s = None if length is None else plan.throughput * length
    seconds = None if tokens is None or per_s is None else tokens / per_s
    hours = None if seconds is None else seconds / _HOUR_S * devices
    return Answer(
        tokens_per_s=per_s,
        tokens=tokens,
        seconds=seconds,
        device_hours=hours,
        cost=None if hours is None or price is None else hours * price,
        energy_kwh=None if hours is None or device.power_w is None else hours * device.power_w / 1e3,
        samples_per_price=plan.throughput * _HOUR_S / (devices * price) if price else None,
    )


def fewest_devices(request: Request) -> int | None:
    """The smallest number of the cluster's devices on which some batch of the request fits; None: not even all."""
    devices = request.cluster.devices
    counts = [count for count in range(1, devices + 1) if devices <= _ALL_COUNTS or devices % count == 0]
    for count in counts:
        try:
            if fits(_on(request, count)):
                return count
        except InvalidInput:  # a space or a limit that this number does not suit
            continue
    return None


def _on(request: Request, devices: int) -> Request:
    cluster = request.cluster.shrunk(devices)
    step = request.batch_step or (None if request.batch is not None else default_batch_step(request.cluster.devices))
    return replace(request, cluster=cluster, batch_step=step)


@dataclass(frozen=True, slots=True)
class Offer:
    """A cluster with its best plan, or why there is none."""

    cluster: str
    plan: Plan | None
    why_not: str = ""


def offers(requests: Sequence[Request], tell: Tell | None = None) -> tuple[Offer, ...]:
    """The best plan on each cluster. Raises the first one's error where there is none on any. ``tell`` hears of
    searches that take more than a second."""
    found: list[Offer] = []
    errors: list[GalvatronError] = []
    for request in requests:
        try:
            found.append(Offer(request.cluster.name, make_plan(request, tell)))
        except (Infeasible, InvalidInput) as error:
            found.append(Offer(request.cluster.name, None, str(error).splitlines()[0]))
            errors.append(error)
    if len(errors) == len(found):
        raise errors[0]
    return tuple(found)


Sort = tuple[int, tuple[str, ...]]
"""Stages of a plan, and the kinds of parallelism that its layers use: plans that differ in it differ in kind."""


def sort_of(plan: Plan) -> Sort:
    """What kind of plan it is."""
    axes = {
        axis.kind
        for stage in plan.stages
        for strategy in stage.strategies
        for axis in (*strategy.axes, *strategy.experts)
    }
    return plan.pipeline_degree, tuple(kind for kind in Kind if kind in axes)


def top_plans(request: Request, most: int) -> tuple[Plan, ...]:
    """The best plans that differ in kind, the fastest first.

    The best plan of each number of stages is the start. The next best without one of its kinds of parallelism is the
    best of what is left: each is searched exactly, so every sort's entry is the best plan with these stages and these
    kinds of parallelism at most. A kind that a plan does not use need not be left out.
    """
    if most < 1:
        raise InvalidInput(f"top: {most} given; expected at least 1 plan")
    limits = request.limits or Limits()
    queue: list[tuple[float, int, Plan, tuple[str, ...]]] = []
    seen: set[tuple[int, tuple[str, ...]]] = set()

    def look(degree: int, forbid: tuple[str, ...]) -> None:
        if (degree, forbid) in seen:
            return
        seen.add((degree, forbid))
        narrowed = replace(limits, pipeline_degree=degree, forbid=tuple(dict.fromkeys((*limits.forbid, *forbid))))
        try:
            plan = try_plan(replace(request, limits=narrowed))
        except InvalidInput:  # nothing is left
            return
        if plan is not None:
            heapq.heappush(queue, (-plan.throughput, len(seen), plan, forbid))

    for degree in request.searched_space.pipeline_degrees(request.cluster.devices):
        look(degree, ())
    found: dict[Sort, Plan] = {}
    while queue and len(found) < most:
        _, _, plan, forbid = heapq.heappop(queue)
        degree, kinds = sort_of(plan)
        found.setdefault((degree, kinds), plan)
        for kind in kinds:
            look(degree, tuple(sorted({*forbid, str(kind)})))
    return tuple(found.values())
