"""Answers for people: time and money of a plan, several clusters, several plans; and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.core.units import format_bytes, format_count, format_seconds
from galvatron.planner.plan.answers import Answer, Offer, sort_of
from galvatron.planner.plan.plan import Plan

__all__ = ["answer_entry", "answer_view", "offers_view", "top_view"]


def answer_entry(said: Answer) -> dict[str, Any]:
    """An answer for programs."""
    return {**asdict(said), "days": said.days}


def answer_view(said: Answer) -> RenderableType:
    """Lines about tokens, days, money and energy, as far as they are known."""
    lines = []
    if said.tokens_per_s is not None:
        lines.append(f"{format_count(round(said.tokens_per_s))} tokens/s")
    if said.tokens is not None and said.seconds is not None and said.device_hours is not None:
        lines.append(
            f"{said.tokens:g} tokens take {_time(said.seconds)}, {said.device_hours:,.0f} device-hours"
            + (f", {said.cost:,.2f} in money" if said.cost is not None else "; no price is known (--price)")
            + (f", {said.energy_kwh:,.0f} kWh" if said.energy_kwh is not None else "")
        )
    elif said.samples_per_price is not None:
        lines.append(f"{said.samples_per_price:,.0f} samples for 1 in money; --tokens says what a whole run costs")
    return Text("\n".join(lines))


def _time(seconds: float) -> str:
    return f"{seconds / 86400:,.1f} days" if seconds >= 86400 else format_seconds(seconds)


def offers_view(offered: Sequence[Offer], said: Sequence[Answer | None], chosen: int) -> RenderableType:
    """Clusters side by side."""
    table = _table("cluster", "samples/s", "tokens/s", "samples a price unit", "days", "cost", "batch", "")
    for number, (offer, about) in enumerate(zip(offered, said, strict=True)):
        if offer.plan is None or about is None:
            table.add_row(offer.cluster, *["–"] * 6, offer.why_not, style="dim")
            continue
        table.add_row(
            offer.cluster,
            f"{offer.plan.throughput:.2f}",
            _or_dash(about.tokens_per_s, ",.0f"),
            _or_dash(about.samples_per_price, ",.1f"),
            _or_dash(about.days, ",.1f"),
            _or_dash(about.cost, ",.2f"),
            str(offer.plan.batch),
            "chosen" if number == chosen else "",
            style="bold" if number == chosen else "",
        )
    return table


def top_view(plans: Sequence[Plan], said: Sequence[Answer]) -> RenderableType:
    """The best plans that differ in kind."""
    table = _table("", "samples/s", "of the best", "batch", "stages", "parallelism", "memory", "cost")
    for number, (plan, about) in enumerate(zip(plans, said, strict=True), start=1):
        degree, kinds = sort_of(plan)
        table.add_row(
            str(number),
            f"{plan.throughput:.2f}",
            f"{plan.throughput / plans[0].throughput:.1%}",
            f"{plan.batch} = {plan.micro_batches} × {plan.micro_batch}",
            str(degree),
            " + ".join(kind.upper() for kind in (*(["pp"] if degree > 1 else []), *kinds)) or "none",
            format_bytes(plan.memory_bytes),
            _or_dash(about.cost, ",.2f"),
        )
    return Group(Text("The best plans that differ in kind", style="bold"), table)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
