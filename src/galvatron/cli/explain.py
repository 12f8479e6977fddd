"""``galvatron explain``: why a plan is what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron.cli import options as opt

if TYPE_CHECKING:
    from galvatron.planner.plan.explain import Explanation
    from galvatron.planner.plan.plan import Plan

__all__ = ["command"]


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.")],
    html: Annotated[
        str | None, typer.Option(help="Write a page to look at to this file: charts in one file, no network.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Write the predicted iteration to this file, for Perfetto (ui.perfetto.dev).")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Explain a plan: why each layer has its strategy, where time and memory go, and how other spaces compare."""
    from galvatron.planner.plan.assumed import assumed_rates
    from galvatron.planner.plan.explain import explain, time_shares
    from galvatron.planner.plan.plan import Plan

    opt.checked_folder(html, "html")
    opt.checked_folder(trace, "trace")
    read = Plan.load(plan)
    if trace is not None:
        _write_trace(read, trace)
    if html is not None:
        from galvatron.planner.pages.plan_page import plan_page

        plan_page(read).save(html)
    if not as_json and (html is not None or trace is not None):
        opt.show(f"written to {' and '.join(path for path in (html, trace) if path is not None)}")
        return
    explanation = explain(read)
    if as_json:
        more = explanation.one_more_gib
        opt.print_json(
            {
                "throughput": explanation.plan.throughput,
                "time_shares": time_shares(explanation.plan),
                "assumed_rates": [asdict(rate) for rate in assumed_rates(explanation.plan)],
                "memory_budget_bytes": explanation.plan.memory_budget_bytes,
                "stages": [{"memory_bytes": stage.memory_bytes} for stage in explanation.plan.stages],
                "layers": [
                    {"index": layer.index, "layer": layer.layer, "strategy": layer.strategy, "why": reason}
                    for layer, reason in zip(
                        (layer for stage in explanation.plan.stages for layer in stage.layers),
                        explanation.reasons,
                        strict=True,
                    )
                ],
                "spaces": [
                    {
                        "space": rival.space,
                        "throughput": rival.plan.throughput if rival.plan else None,
                        "batch": rival.plan.batch if rival.plan else None,
                        "obstacle": rival.obstacle,
                    }
                    for rival in explanation.rivals
                ],
                "one_more_gib": {"throughput": more.throughput, "batch": more.batch},
                **_lengths(explanation),
            }
        )
        return
    from galvatron.planner.plan.render import explanation_view

    opt.show(explanation_view(explanation))


def _lengths(explanation: Explanation) -> dict[str, Any]:
    """Only of plans whose sequences may be divided."""
    if not explanation.plan.space.context_parallel:
        return {}
    larger = [
        {
            "devices": more.devices,
            "throughput": more.plan.throughput if more.plan else None,
            "longest_sequence": more.longest,
        }
        for more in explanation.larger
    ]
    return {"longest_sequence": explanation.longest, "more_devices": larger}


def _write_trace(plan: Plan, path: str) -> None:
    from galvatron.planner.plan.timeline import timeline
    from galvatron.planner.plan.trace import predicted_events, write_trace

    write_trace(predicted_events(plan, timeline(plan)), path)
