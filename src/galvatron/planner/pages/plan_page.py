"""The page of a plan: its stages, its iteration, its memory, and what else there could be."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from galvatron.core.spec import CONTEXT_KINDS, DENSE_KINDS, Cluster, Factors
from galvatron.core.units import format_bytes, format_count, format_seconds
from galvatron.planner.pages.curves import Curves, Point, curves, point_note
from galvatron.planner.pages.page import Card, Page, Section, chart, paragraph, table
from galvatron.planner.plan.explain import Explanation, explain, request_of, time_shares
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import PlannedStage, layer_runs
from galvatron.planner.plan.timeline import WAIT, Span, Timeline, timeline

__all__ = ["plan_cards", "plan_facts", "plan_page", "plan_sections", "plan_subtitle"]

_MOST_SPANS = 1600
"""On the timeline: more could not be told apart, and would make the file large."""
_TIMES = {
    "compute_s": "compute",
    "tp_s": "TP",
    "ep_s": "EP",
    "cp_s": "CP",
    "sdp_s": "SDP",
    "layout_s": "layout changes",
    "transfer_s": "receiving",
    "sync_s": "gradient sync",
    "optimizer_s": "optimizer",
}
_ONCE = ("sync_s", "optimizer_s")
_ZOOM = (
    '<div class="tools"><button id="zoom-in" type="button">Zoom in</button>'
    '<button id="zoom-out" type="button">Zoom out</button><button id="go-left" type="button">◀</button>'
    '<button id="go-right" type="button">▶</button><button id="zoom-all" type="button">All</button>'
    '<span class="soft">or drag, and Shift + wheel</span></div>'
)


def plan_page(plan: Plan, seconds: float = 6.0) -> Page:
    """A plan and what stands beside it. Searches the other spaces, and, for so long, other batches and budgets."""
    explanation = explain(plan)
    around = curves(request_of(plan), plan, seconds)
    return Page(
        title=f"{plan.model.name} on {plan.cluster.facts.name}",
        subtitle=plan_subtitle(plan),
        cards=plan_cards(plan),
        sections=[*plan_sections(plan, explanation.reasons), *_alternatives(explanation, around), _certificate(plan)],
        facts={
            **plan_facts(plan, explanation.reasons),
            "spaces": _space_facts(explanation),
            "batches": _curve_facts(around.batches),
            "budgets": _curve_facts(around.budgets),
        },
    )


def plan_subtitle(plan: Plan) -> str:
    """Model and cluster in a line."""
    facts = plan.cluster.facts
    return (
        f"{format_count(plan.model.parameters)} parameters, {plan.model.training.precision}, "
        f"{plan.cluster.devices} × {facts.device.name}, {format_bytes(plan.memory_budget_bytes)} each"
    )


def plan_cards(plan: Plan) -> list[Card]:
    """What people ask first."""
    stages = f"{plan.pipeline_degree} ({plan.schedule})" if plan.pipeline_degree > 1 else "1"
    length = plan.model.training.sequence_length
    tokens = f"{format_count(round(plan.throughput * length))} tokens/s" if length else ""
    return [
        Card("samples/s", f"{plan.throughput:.2f}", tokens),
        Card("iteration", format_seconds(plan.iteration_s), f"batch {plan.batch}"),
        Card("micro-batches", f"{plan.micro_batches} × {plan.micro_batch}"),
        Card("stages", stages),
        Card("memory", format_bytes(plan.memory_bytes), f"of {format_bytes(plan.memory_budget_bytes)}"),
        Card("bubble", f"{plan.bubble_s / plan.iteration_s:.1%}", "of the iteration"),
    ]


def plan_sections(plan: Plan, reasons: tuple[str, ...]) -> list[Section]:
    """Stages and layers, the iteration, memory, and time."""
    shown = timeline(plan)
    ends = f"The timeline ends after {format_seconds(shown.end_s)}; the plan's formula says "
    ends += f"{format_seconds(plan.iteration_s)}. Communication inside a pass is drawn at its end."
    shares = sorted(time_shares(plan).items(), key=lambda item: -item[1])
    listed = [[name, f"{share:.1%}"] for name, share in shares if share >= 0.0005]
    return [
        Section("Stages and layers", chart("layers") + _layer_table(plan, reasons) + _link_table(plan)),
        Section("One iteration", paragraph(ends) + _ZOOM + chart("timeline")),
        Section("Memory at the peak, against the budget", chart("memory") + _memory_table(plan)),
        Section(
            "Where the time goes",
            chart("times")
            + paragraph("Of the slowest stage:")
            + table(["what", "share of the iteration"], listed, numbers=[1]),
        ),
    ]


def plan_facts(plan: Plan, reasons: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of the charts of :func:`plan_sections`."""
    whole = timeline(plan)
    numbers = list(range(plan.pipeline_degree))
    runs = [
        {
            "stage": number,
            "begin": layer.index,
            "end": layer.index + count,
            "kind": layer.layer,
            "strategy": layer.strategy,
            "reason": reasons[layer.index],
        }
        for number, stage in enumerate(plan.stages)
        for layer, count in layer_runs(stage.layers)
    ]
    return {
        "layers": {
            "stages": numbers,
            "layers": runs[-1]["end"],
            "strategies": list(dict.fromkeys(run["strategy"] for run in runs)),
            "runs": runs,
        },
        "timeline": _timeline_facts(whole.shortened(_MOST_SPANS), numbers),
        "memory": _memory_facts(plan),
        "times": _time_facts(plan, whole),
    }


def _timeline_facts(shown: Timeline, numbers: list[int]) -> dict[str, Any]:
    spans = [piece for stage in shown.stages for span in stage for piece in _pieces(span)]
    kinds = list(dict.fromkeys(span["kind"] for span in spans))
    return {"stages": numbers, "end_s": shown.end_s, "kinds": kinds, "spans": spans}


def _pieces(span: Span) -> list[dict[str, Any]]:
    """A span as the chart draws it: a pass is its computation, and then its communication."""
    own = next((part.seconds for part in span.parts if part.name == "compute"), span.seconds)
    middle = span.start_s + own if span.parts else span.end_s
    others = ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in span.parts if part.name != "compute")
    number = "" if span.micro_batch is None else f" of micro-batch {span.micro_batch}"
    name = f"{span.name}{number}" + (f" (communication: {others})" if others else "")
    places = [(span.name, span.start_s, middle), ("communication", middle, span.end_s)]
    return [
        {"stage": span.stage, "name": name, "kind": kind, "start": _digits(start), "end": _digits(end)}
        for kind, start, end in places
        if end > start
    ]


def _digits(seconds: float) -> float:
    """To the nanosecond: more would only make the file larger."""
    return round(seconds, 9)


def _row(number: int) -> str:
    return f"stage {number}"


def _stacked(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Stages as stacked bars."""
    kinds = [kind for kind in rows[0] if any(row[kind] > 0 for row in rows)]
    parts = [
        {"row": _row(number), "kind": kind, "value": row[kind]} for number, row in enumerate(rows) for kind in kinds
    ]
    return {"rows": [_row(number) for number in range(len(rows))], "kinds": kinds, "parts": parts}


def _memory_facts(plan: Plan) -> dict[str, Any]:
    return {**_stacked([asdict(stage.memory) for stage in plan.stages]), "budget": plan.memory_budget_bytes}


def _time_facts(plan: Plan, whole: Timeline) -> dict[str, Any]:
    rows = []
    for number, stage in enumerate(plan.stages):
        row = {
            name: whole.scaled * getattr(stage.time, field) * (1 if field in _ONCE else plan.micro_batches)
            for field, name in _TIMES.items()
        }
        rows.append(row | {WAIT: whole.waiting_s(number)})
    return _stacked(rows)


def _layer_table(plan: Plan, reasons: tuple[str, ...]) -> str:
    rows = []
    for number, stage in enumerate(plan.stages):
        devices = f"{stage.devices[0]} to {stage.devices[-1]}" if len(stage.devices) > 1 else str(stage.devices[0])
        for layer, count in layer_runs(stage.layers):
            span = str(layer.index) if count == 1 else f"{layer.index} to {layer.index + count - 1}"
            rows.append([str(number), devices, span, layer.layer, layer.strategy, reasons[layer.index]])
    columns = ["stage", "devices", "layers", "kind", "strategy", "why"]
    if not any(reasons):  # nobody asked
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows, numbers=[0])


def _link_table(plan: Plan) -> str:
    """What groups of each strategy span."""
    cluster = plan.cluster.facts
    used: dict[tuple[str, ...], list[str]] = {}
    for number, stage in enumerate(plan.stages):
        for strategy in dict.fromkeys(stage.strategies):
            for kind in (*DENSE_KINDS, *CONTEXT_KINDS):
                if factors := strategy.factors(kind):
                    group = (str(strategy), f"{kind.upper()} of {strategy.degree(kind)}", *_spanned(cluster, factors))
                    used.setdefault(group, []).append(str(number))
    rows = [[", ".join(stages), *group] for group, stages in used.items()]
    if plan.pipeline_degree > 1:
        size = len(plan.stages[0].devices)
        link = cluster.stage_link(size)
        rows.append(
            ["between", "–", "a device and its peer", "the slowest boundary", f"{link.bytes_per_s / 1e9:.3g} GB/s"]
        )
    if not rows:
        return ""
    return table(["stages", "strategy", "group", "spans", "bandwidth"], rows, numbers=[4])


def _spanned(cluster: Cluster, factors: Factors) -> list[str]:
    """The outermost level that a group crosses, and what it gets."""
    name, unit = "–", 1
    for level in cluster.levels:
        if any(unit % factor.block for factor in factors):
            name = level.name
        unit *= level.units
    return [name, f"{cluster.link(factors).bytes_per_s / 1e9:.3g} GB/s"]


def _memory_table(plan: Plan) -> str:
    def row(number: int, stage: PlannedStage) -> list[str]:
        use = stage.memory
        parts = (use.states, use.activations, use.transient, use.reserved, stage.memory_bytes)
        left = plan.memory_budget_bytes - stage.memory_bytes
        return [str(number), *map(format_bytes, parts), format_bytes(left), str(stage.in_flight)]

    columns = ["stage", "states", "activations", "transient", "reserved", "peak", "left", "in flight"]
    rows = [row(number, stage) for number, stage in enumerate(plan.stages)]
    return table(columns, rows, numbers=range(len(columns)))


def _space_facts(explanation: Explanation) -> list[dict[str, Any]]:
    return [
        {
            "space": rival.space,
            "throughput": rival.plan.throughput if rival.plan else None,
            "obstacle": rival.obstacle,
            "ours": rival.space == explanation.plan.space.name,
        }
        for rival in explanation.rivals
    ]


def _curve_facts(points: tuple[Point, ...]) -> list[dict[str, Any]]:
    return [
        {
            "at": point.at,
            "throughput": point.plan.throughput if point.plan else None,
            "note": point_note(point),
            "ours": point.ours,
            "best": point.plan is not None and point.plan.certificate is not None,
        }
        for point in points
    ]


def _alternatives(explanation: Explanation, around: Curves) -> list[Section]:
    names = [rival.space for rival in explanation.rivals]
    own = explanation.plan.space.name
    rows = []
    for rival in explanation.rivals:
        plan = rival.plan
        figures = ["–"] * 4
        if plan is not None:
            share = plan.throughput / explanation.plan.throughput
            figures = [f"{plan.throughput:.2f}", f"{share:.0%}", str(plan.batch), str(plan.pipeline_degree)]
        rows.append([rival.space, *figures, rival.obstacle])
    columns = ["space", "samples/s", "of ours", "batch", "stages", "what stops it"]
    listed = table(columns, rows, numbers=[1, 2, 3, 4], ours=names.index(own) if own in names else -1)
    note = "Each point is the best plan there, searched when this page was made; the large one is this plan."
    if around.left_out:
        note += f" {around.left_out} more points were left out, because each search takes long."
    charts = f'<div class="pair"><div>{chart("batches")}</div><div>{chart("budgets")}</div></div>'
    return [
        Section("The best plan of every space", chart("spaces") + listed),
        Section("Another batch, another memory", paragraph(note) + charts),
    ]


def _certificate(plan: Plan) -> Section:
    proof = plan.certificate
    if proof is None:
        return Section("Certificate", paragraph("Written by hand: nothing is proven about it."))
    said = (
        f"No plan of the space {plan.space.name!r} takes less than {format_seconds(proof.lower_bound_s)} at this "
        f"batch, or has a higher throughput at another one that was searched. This plan takes "
        f"{format_seconds(plan.iteration_s)}: gap {proof.gap:g}{'' if proof.gap == 0 else f', {proof.proven}'}."
    )
    rows = [
        ["combinations of batch, stages and micro-batches", str(proof.combinations)],
        ["of these looked into", str(proof.opened)],
        ["of these solved exactly", str(proof.solved)],
        ["stages solved", str(proof.stages_solved)],
    ]
    return Section("Certificate", paragraph(said) + table(["what", "number"], rows, numbers=[1]))
