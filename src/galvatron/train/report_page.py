"""``report.html`` of a run: its loss, what was predicted beside what was measured, and its plan. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from galvatron.core.units import format_seconds
from galvatron.planner.pages.page import Card, Page, Section, chart, paragraph
from galvatron.planner.pages.plan_page import plan_facts, plan_sections, plan_subtitle
from galvatron.planner.plan.plan import Plan
from galvatron.train.report import Report, explanation

__all__ = ["report_page"]

_PHASES = {
    "forward and backward": "work_s",
    "waiting": "waiting_s",
    "data": "data_s",
    "sums and optimizer": "rest_s",
}
_MOST_LOSSES = 2000
"""On the chart: of longer runs every so manieth is drawn."""


def report_page(plan: Plan, report: Report, metrics: Sequence[dict[str, Any]]) -> Page:
    """A run's page, from its report and the lines of its metrics file."""
    reasons = ("",) * sum(len(stage.layers) for stage in plan.stages)
    differences = [f"The difference: {line}." for line in explanation(report)] or ["Prediction and run agree."]
    beside = Section("Predicted and measured", "".join(map(paragraph, differences)) + chart("phases") + chart("peaks"))
    return Page(
        title=f"{plan.model.name}: a run of {report.steps} steps",
        subtitle=plan_subtitle(plan),
        cards=[
            Card("loss", f"{report.last_loss:.4f}", f"from {report.first_loss:.4f}"),
            Card("iteration", format_seconds(report.measured_s), f"predicted {format_seconds(report.predicted_s)}"),
            Card("measured against predicted", report.compared),
            Card("samples/s", f"{report.samples_per_s:.2f}", f"batch {plan.batch}"),
        ],
        sections=[Section("Loss", chart("losses")), beside, *plan_sections(plan, reasons)],
        facts={
            **plan_facts(plan, reasons),
            "losses": _losses(metrics),
            "phases": _phases(report),
            "peaks": _peaks(report),
        },
    )


def _losses(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    every = -(-len(metrics) // _MOST_LOSSES) or 1
    drawn = [
        {"step": line["step"], "kind": "training", "loss": line["loss"]}
        for place, line in enumerate(metrics)
        if place % every == 0 or place == len(metrics) - 1
    ]
    held_out = [
        {"step": line["step"], "kind": "held out", "loss": line["evaluation_loss"]}
        for line in metrics
        if "evaluation_loss" in line
    ]
    return drawn + held_out


def _phases(report: Report) -> dict[str, Any]:
    slowest = max(report.stages, key=lambda stage: stage.measured.work_s)
    parts = [
        {"row": name, "kind": kind, "value": getattr(times, field)}
        for name, field in _PHASES.items()
        for kind, times in (("predicted", slowest.predicted), ("measured", slowest.measured))
    ]
    return {"rows": list(_PHASES), "kinds": ["predicted", "measured"], "parts": parts}


def _peaks(report: Report) -> dict[str, Any]:
    rows = [f"stage {stage.stage}" for stage in report.stages]
    parts = [
        {"row": row, "kind": kind, "value": times.memory_bytes}
        for row, stage in zip(rows, report.stages, strict=True)
        for kind, times in (("predicted", stage.predicted), ("measured", stage.measured))
    ]
    return {"rows": rows, "kinds": ["predicted", "measured"], "parts": parts}
