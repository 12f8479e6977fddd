"""A layout that somebody runs today: whether it fits, how fast it is, and what would be faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from galvatron.core.errors import Infeasible, InvalidInput
from galvatron.core.spec import ModelSpec
from galvatron.planner.exchange.best import Found, best_for, conventions_of, needed_bytes
from galvatron.planner.exchange.deepspeed import DEEPSPEED
from galvatron.planner.exchange.from_deepspeed import deepspeed_setup, read_deepspeed
from galvatron.planner.exchange.from_megatron import megatron_setup, read_megatron
from galvatron.planner.exchange.from_torchtitan import read_torchtitan, torchtitan_setup
from galvatron.planner.exchange.megatron import MEGATRON
from galvatron.planner.exchange.reading import Reading
from galvatron.planner.exchange.target import Target
from galvatron.planner.exchange.torchtitan import TORCHTITAN
from galvatron.planner.exchange.uniform import stages_of
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan

__all__ = ["SOURCES", "Price", "Source", "price_layout", "source_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A system whose layouts are read."""

    target: Target
    setup: Callable[[str, int], Setup]
    """What a layout's text says of training, on so many devices."""
    read: Callable[[str, ModelSpec, int], Reading]


SOURCES = (
    Source(target=MEGATRON, setup=megatron_setup, read=read_megatron),
    Source(target=TORCHTITAN, setup=torchtitan_setup, read=read_torchtitan),
    Source(target=DEEPSPEED, setup=deepspeed_setup, read=read_deepspeed),
)


def source_named(name: str) -> Source:
    """The system of this name."""
    for source in SOURCES:
        if source.target.name == name:
            return source
    raise InvalidInput(f"from: {name!r} is unknown; choose one of {', '.join(each.target.name for each in SOURCES)}")


@dataclass(frozen=True, slots=True)
class Price:
    """A layout beside what could be run in its place."""

    reading: Reading
    plan: Plan
    budget_bytes: int
    within: Found | None
    """The best that the same system can run at this batch; None: nothing fits."""
    best: Plan | None
    """The best of all plans at this batch; None: nothing fits."""
    within_title: str
    """The system's name."""

    @property
    def fits(self) -> bool:
        return needed_bytes(self.plan) <= self.budget_bytes


def price_layout(request: Request, source: Source, text: str) -> Price:
    """Price what a text says. The request is for the model, cluster and batch that it was written for."""
    reading = source.read(text, request.model, request.cluster.devices)
    layout = reading.layout
    asked = replace(request, batch=layout.batch, conventions=conventions_of(layout), schedule=reading.schedule)
    plan = priced(asked, stages_of(layout, request.model), micro_batches=layout.micro_batches)
    same = replace(request, batch=layout.batch)
    try:
        within = best_for(same, source.target)
    except Infeasible:
        within = None
    return Price(reading, plan, request.budget_bytes, within, try_plan(same), source.target.title)
