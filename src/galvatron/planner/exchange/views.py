"""Exports and prices, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.core.units import format_bytes, format_count
from galvatron.planner.exchange.best import needed_bytes
from galvatron.planner.exchange.export import Export
from galvatron.planner.exchange.pricing import Price
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform
from galvatron.planner.plan.plan import Plan

__all__ = ["export_entry", "export_file", "export_lines", "layout_text", "price_entry", "price_view"]


def layout_text(layout: Uniform) -> str:
    """A layout in a line: ``PP4 × DP4 × TP4, ZeRO-1, sequence parallel, micro-batches 32 × 1``."""
    degrees = [("PP", layout.pipeline), ("DP", layout.data), ("TP", layout.tensor)]
    parts = [" × ".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "one device"]
    if layout.replicas > 1 and layout.shards > 1:
        parts.append(f"{layout.replicas} replicas of {layout.shards} shards")
    elif layout.data > 1:
        stage = {Sharding.NONE: "DDP", Sharding.OPTIMIZER: "ZeRO-1", Sharding.GRADIENTS: "ZeRO-2"}
        parts.append(stage.get(layout.sharding, "ZeRO-3"))
    if layout.expert > 1:
        inside = f" with TP{layout.expert_tensor} inside" if layout.expert_tensor > 1 else ""
        parts.append(f"EP{layout.expert}{inside}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    if layout.recompute is not Recompute.NONE:
        some = "" if layout.recomputed is None else f" in {layout.recomputed} blocks of each stage"
        parts.append(f"recompute of {layout.recompute}{some}")
    if len(set(layout.blocks)) > 1:
        parts.append(f"{'+'.join(map(str, layout.blocks))} blocks")
    parts.append(f"micro-batches {layout.micro_batches} × {layout.micro_batch}")
    return ", ".join(parts)


def export_file(export: Export) -> str:
    """The file for the other system, with what is to be said in it where it can have comments."""
    comment = export.target.comment
    return "".join(f"{comment}{line}\n" for line in export_lines(export) if comment) + export.text


def export_lines(export: Export) -> Iterator[str]:
    """What is to be said beside the text of an export."""
    if export.why_not:
        yield export.why_not
        yield (
            f"the best plan that {export.target.title} can run: {layout_text(export.layout)}: "
            f"{export.plan.throughput:.4g} samples/s, {abs(export.lost):.1%} {'less' if export.lost >= 0 else 'more'} "
            f"than the {export.asked.throughput:.4g} of the plan"
        )
    else:
        yield f"{export.target.title} can run the plan as it is: {layout_text(export.layout)}"
    yield from export.notes


def export_entry(export: Export) -> dict[str, Any]:
    """An export for programs."""
    return {
        "target": export.target.name,
        "text": export.text,
        "layout": asdict(export.layout),
        "exact": not export.why_not,
        "why_not": export.why_not or None,
        "throughput": export.plan.throughput,
        "plan_throughput": export.asked.throughput,
        "memory_bytes": export.plan.memory_bytes,
        "notes": export.notes,
    }


def price_entry(price: Price) -> dict[str, Any]:
    """A price for programs."""
    reading = price.reading
    return {
        "layout": asdict(reading.layout),
        "schedule": reading.schedule.name,
        "fits": price.fits,
        "memory_bytes": price.plan.memory_bytes,
        "memory_budget_bytes": price.budget_bytes,
        **_figures(price.plan),
        "priced_as": reading.remarks,
        "not_priced": reading.unpriced,
        "unknown": reading.unknown,
        "same_system": None if price.within is None else {
            "layout": asdict(price.within.layout), **_figures(price.within.plan)
        },
        "best": None if price.best is None else _figures(price.best),
    }  # fmt: skip


def _figures(plan: Plan) -> dict[str, float | None]:
    """Speed of a plan in the units of published figures."""
    devices, length = plan.cluster.devices, plan.model.training.sequence_length
    flops = 3 * plan.model.spec().forward_flops * plan.throughput / devices  # backward is twice forward
    return {
        "throughput": plan.throughput,
        "iteration_s": plan.iteration_s,
        "tokens_per_s_per_device": None if length is None else plan.throughput * length / devices,
        "tflops_per_device": flops / 1e12,
    }


def price_view(price: Price) -> RenderableType:
    """A layout beside what could be run in its place."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("")
    for column in ("samples/s", "tokens/s\na device", "TFLOP/s\na device", "memory", "of the\ngiven"):
        table.add_column(column, justify="right")
    table.add_row(*_row("given", price.plan, price))
    if price.within is not None:
        table.add_row(*_row(f"best of {price.within_title}", price.within.plan, price))
    if price.best is not None:
        table.add_row(*_row("best plan", price.best, price))
    given = f"given: {layout_text(price.reading.layout)}, {price.plan.model.training.precision}"
    return Group(Text(given), table, Text("\n".join(_sentences(price))))


def _row(name: str, plan: Plan, price: Price) -> tuple[str, ...]:
    figures = _figures(plan)
    tokens = figures["tokens_per_s_per_device"]
    return (
        name,
        f"{plan.throughput:.4g}",
        "–" if tokens is None else format_count(round(tokens)),
        f"{figures['tflops_per_device']:.0f}",
        format_bytes(plan.memory_bytes),
        f"{plan.throughput / price.plan.throughput:.0%}",
    )


def _sentences(price: Price) -> Iterator[str]:
    budget = format_bytes(price.budget_bytes)
    if price.fits:
        yield f"It fits: {format_bytes(price.plan.memory_bytes)} of {budget} on the fullest device."
    else:
        needed = format_bytes(needed_bytes(price.plan))
        yield f"It does not fit: with what the allocator takes the fullest device needs {needed}, and has {budget}."
    if price.within is not None and (not price.fits or price.within.plan.throughput > price.plan.throughput):
        yield f"What {price.within_title} could run: {layout_text(price.within.layout)}."
    elif price.within is not None:
        yield f"{price.within_title} can run nothing that is faster and fits."
    else:
        yield f"{price.within_title} can run nothing that fits at this batch."
    if price.best is None:
        yield f"No plan of ours fits at this batch; 'galvatron plan … --batch {price.plan.batch}' says what would help."
    if price.best is not None and (not price.fits or price.best.throughput > price.plan.throughput):
        yield f"The best plan is written by 'galvatron plan … --batch {price.plan.batch} --output plan.json'."
    yield from (f"Priced otherwise: {remark}." for remark in price.reading.remarks)
    if price.reading.unpriced:
        yield f"Not priced: {', '.join(price.reading.unpriced)}."
    if price.reading.unknown:
        yield f"Not known to us, and not priced: {', '.join(price.reading.unknown)}."
