"""``galvatron compare``: all spaces side by side over several budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from galvatron.cli import options as opt
from galvatron.planner.plan.options import Setup

if TYPE_CHECKING:
    from galvatron.planner.plan.compare import Cell

__all__ = ["command"]


@opt.arranged(opt.SETUP_PANELS)
@opt.takes_setup("memory", "space")
def command(
    model: opt.ModelSource,
    cluster: opt.ClusterSource,
    memory: Annotated[str, typer.Option(help="Memory budgets, separated by commas: 8GB,12GB,16GB.")],
    setup: Setup,
    html: Annotated[str | None, typer.Option(help="Write a page to look at to this file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Compare the best plans of all spaces (DP, TP, PP, …) at several memory budgets."""
    from galvatron.core.units import parse_bytes
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.compare import compare
    from galvatron.planner.plan.setup import request_for

    opt.checked_folder(html, "html")
    budgets = [parse_bytes(part, where="memory") for part in memory.split(",")]
    comparison = compare(request_for(model, cluster, {**setup, "memory": max(budgets)}, load_any_model), budgets)
    if html is not None:
        from galvatron.planner.pages.comparison_page import comparison_page

        comparison_page(comparison).save(html)
    if as_json:
        opt.print_json([_entry(cell) for row in comparison.rows for cell in row])
        return
    from galvatron.planner.plan.render import comparison_view

    opt.show(comparison_view(comparison))


def _entry(cell: Cell) -> dict[str, str | int | float | None]:
    plan = cell.plan
    return {
        "space": cell.space,
        "memory_bytes": cell.memory_bytes,
        "throughput": plan.throughput if plan else None,
        "batch": plan.batch if plan else None,
        "micro_batches": plan.micro_batches if plan else None,
        "pipeline_degree": plan.pipeline_degree if plan else None,
        "why_not": None if plan else cell.why_not,
    }
