"""Throughput against the batch and against memory: the best plan at a few other batches and budgets, each searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.core.units import format_bytes
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan

__all__ = ["Curves", "Point", "curves", "point_note"]

_BATCHES = (1, 2, 0.5, 4, 0.25, 8, 0.125)
_BUDGETS = (1, 1.25, 0.75, 1.5, 0.5, 2, 0.375)
"""Times those of the plan, the nearest first."""


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan at another batch or budget; None: nothing fits."""

    at: int
    plan: Plan | None
    ours: bool


@dataclass(frozen=True, slots=True)
class Curves:
    """Points in the order of what changes."""

    batches: tuple[Point, ...]
    budgets: tuple[Point, ...]
    left_out: int
    """Points for which there was no time."""


def curves(request: Request, plan: Plan, seconds: float = 6.0) -> Curves:
    """The best plans around a plan, as many as so many seconds of a processor allow; of each curve at least one."""
    end = time.process_time() + seconds
    batches = sorted({max(1, round(plan.batch * factor)) for factor in _BATCHES}, key=lambda at: abs(at - plan.batch))
    budget = plan.memory_budget_bytes
    most = [int(budget * factor) for factor in _BUDGETS]
    by_batch = _searched(batches, plan, plan.batch, lambda at: _at_batch(request, at), end - seconds / 2)
    by_budget = _searched(most, plan, budget, lambda at: _at_budget(request, at), end)
    left = len(batches) + len(most) - len(by_batch) - len(by_budget)
    return Curves(tuple(by_batch), tuple(by_budget), left)


def _searched(places: Sequence[int], plan: Plan, own: int, asked: Callable[[int], Request], end: float) -> list[Point]:
    found: list[Point] = []
    for at in places:
        if at == own:
            found.append(Point(at, plan, True))
        elif len(found) < 2 or time.process_time() < end:
            found.append(Point(at, _tried(asked, at), False))
    return sorted(found, key=lambda point: point.at)


def _tried(asked: Callable[[int], Request], at: int) -> Plan | None:
    try:
        return try_plan(asked(at))
    except InvalidInput:  # a space that the number does not suit
        return None


def _at_batch(request: Request, batch: int) -> Request:
    return replace(request, batch=batch, batch_step=None, max_batch=None)


def _at_budget(request: Request, budget: int) -> Request:
    """With devices of that memory, sold or not."""
    device = replace(request.cluster.device, memory_bytes=max(budget, request.cluster.device.memory_bytes))
    return replace(request, cluster=replace(request.cluster, device=device), memory_bytes=budget)


def point_note(point: Point) -> str:
    """What a point says besides its throughput."""
    if point.plan is None:
        return "nothing fits"
    plan = point.plan
    stages = f"{plan.pipeline_degree} stage{'s' if plan.pipeline_degree > 1 else ''}"
    return f"batch {plan.batch}, {stages}, {format_bytes(plan.memory_bytes)} used"
