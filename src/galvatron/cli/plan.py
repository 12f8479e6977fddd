"""``galvatron plan``: the provably best plan for a model on a cluster."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.options import Setup

__all__ = ["command"]


@opt.takes_setup()
def command(
    model: opt.ModelSource,
    cluster: opt.ClusterHere,
    setup: Setup,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever was measured before.")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Find the fastest plan for MODEL and prove that none in the space is better."""
    from galvatron.planner.plan.advice import make_plan
    from galvatron.planner.plan.setup import request_for

    if cluster == "auto":
        opt.need_torch("plan --cluster auto")
        from galvatron.cli.progress import shown_progress
        from galvatron.measure.auto import request_here

        request = request_here(model, setup, measuring=shown_progress, fresh=fresh)
    elif fresh:
        raise InvalidInput(f"--fresh: nothing is measured for --cluster {cluster}; leave one of the two out")
    else:
        from galvatron.measure.models import load_any_model

        request = request_for(model, cluster, setup, load_any_model)
    started = time.perf_counter()
    plan = make_plan(request)
    search_s = time.perf_counter() - started
    if output:
        plan.save(output)
    if as_json:
        opt.print_json({**plan.to_dict(), "search_s": search_s})
        return
    from galvatron.planner.plan.render import plan_view

    opt.show(plan_view(plan), f"search took {search_s * 1e3:.0f} ms")
    if output:
        opt.show(f"written to {output}; 'galvatron explain {output}' says why")
