"""The page of a comparison: the best plan of every space at every budget."""

from __future__ import annotations

from galvatron.core.units import format_bytes
from galvatron.planner.pages.page import Card, Page, Section, chart, paragraph, table
from galvatron.planner.plan.compare import Cell, Comparison

__all__ = ["comparison_page"]


def comparison_page(comparison: Comparison) -> Page:
    """All spaces side by side."""
    request = comparison.request
    cells = [cell for row in comparison.rows for cell in row]
    best = max((cell.plan.throughput for cell in cells if cell.plan), default=None)
    rows = [[row[0].space, *map(_figure, row)] for row in comparison.rows]
    columns = ["space", *map(format_bytes, comparison.budgets)]
    listed = table(columns, rows, numbers=range(1, len(columns)))
    cluster = request.cluster
    return Page(
        title=f"{request.model.name} on {cluster.name}",
        subtitle=f"{cluster.devices} × {cluster.device.name}, every space at {len(comparison.budgets)} budgets",
        cards=[Card("best", "nothing fits" if best is None else f"{best:.2f} samples/s")],
        sections=[
            Section("Throughput against memory", chart("comparison")),
            Section("Samples a second (batch)", paragraph("Each is the best plan of its space.") + listed),
        ],
        facts={
            "comparison": {
                "budgets": list(comparison.budgets),
                "spaces": [row[0].space for row in comparison.rows],
                "cells": [
                    {
                        "space": cell.space,
                        "memory": cell.memory_bytes,
                        "throughput": cell.plan.throughput,
                        "batch": cell.plan.batch,
                    }
                    for cell in cells
                    if cell.plan is not None
                ],
            }
        },
    )


def _figure(cell: Cell) -> str:
    return cell.why_not if cell.plan is None else f"{cell.plan.throughput:.2f} ({cell.plan.batch})"
