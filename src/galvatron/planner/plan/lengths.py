"""How long samples may be: the longest sequence that fits, here and with more devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron.core.errors import GalvatronError
from galvatron.families import load_model
from galvatron.planner.plan.advice import fits
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan

__all__ = ["MoreDevices", "longest_sequence", "more_devices"]

_MOST_DOUBLINGS = 10
_PARTS = 16
"""Between the last doubling that fits and the next, lengths in so many equal steps are told apart."""


@dataclass(frozen=True, slots=True)
class MoreDevices:
    """The same request on a larger cluster."""

    devices: int
    plan: Plan | None
    """The best plan for samples as long as now; None: there is none."""
    longest: int | None
    """Tokens of the longest sample that fits; None: nobody knows."""


def longest_sequence(request: Request) -> int | None:
    """Tokens of the longest sample with which some plan of the request's space fits at its smallest batch, to a
    sixteenth of a power of two times the length now.

    None: the layers cannot be counted for other lengths (a traced model), or the length now does not fit either.
    """
    length = request.model.training.sequence_length
    if length is None or not _fits(request, length):
        return None
    low = length
    for _ in range(_MOST_DOUBLINGS):
        if not _fits(request, 2 * low):
            break
        low *= 2
    step = low // _PARTS
    high = low + _PARTS * step
    while step and high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (middle, high) if _fits(request, middle) else (low, middle)
    return low


def _fits(request: Request, length: int) -> bool:
    model = request.model
    if model.config is None or model.training.tunes:
        return False
    try:
        changed = load_model(dict(model.config), replace(model.training, sequence_length=length))
        training = replace(model.training, sequence_length=length)
        return fits(replace(request, model=replace(changed, name=model.name, training=training), profile=None))
    except GalvatronError:  # longer than its positions, or nothing divides it
        return False


def more_devices(request: Request) -> tuple[MoreDevices, ...]:
    """One more of what the cluster consists of (devices, or nodes where there are several), and twice as many."""
    found = []
    units = request.cluster.levels[-1].units if request.cluster.levels else 1
    for more in dict.fromkeys((units + 1, 2 * units)):
        if not request.cluster.levels:
            return ()
        *inner, outer = request.cluster.levels
        cluster = replace(request.cluster, levels=(*inner, replace(outer, units=more)))
        most = None if request.max_batch is None else request.max_batch * more // units
        larger = replace(request, cluster=cluster, max_batch=most)
        try:
            plan = try_plan(larger)
        except GalvatronError:
            plan = None
        found.append(MoreDevices(cluster.devices, plan, longest_sequence(larger)))
    return tuple(found)
