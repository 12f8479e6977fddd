"""``galvatron plan``: the provably best plan for a model on a cluster."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from galvatron.cli import options as opt

__all__ = ["command"]


def command(
    model: opt.ModelSource,
    cluster: opt.ClusterSource,
    memory: Annotated[str | None, typer.Option(help="Budget of each device: 8GB, 8GiB (default: all it has).")] = None,
    batch: opt.FixedBatch = None,
    batch_step: opt.BatchStep = None,
    max_batch: opt.MaxBatch = None,
    max_micro_batches: opt.MaxMicroBatches = None,
    space: Annotated[str, typer.Option(help="full, dp, tp, pp, sdp, 3d, dp+tp or dp+pp.")] = "full",
    schedule: opt.ScheduleKind = None,
    cuts: opt.CutsRule = None,
    precision: opt.PrecisionKind = None,
    attention: opt.AttentionKind = None,
    dropout: opt.Dropout = None,
    sequence_length: opt.SequenceLength = None,
    profile: opt.ProfileFile = None,
    recompute: opt.Recompute = None,
    sequence_parallel: opt.SequenceParallel = None,
    zero2: opt.Zero2 = None,
    hybrid_sharding: opt.HybridSharding = None,
    accumulation: opt.Accumulation = None,
    paper: opt.Paper = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Find the fastest plan for MODEL and prove that none in the space is better."""
    from galvatron.plans.advice import make_plan
    from galvatron.plans.setup import Setup, request_for

    setup = Setup(
        memory=memory,
        batch=batch,
        batch_step=batch_step,
        max_batch=max_batch,
        max_micro_batches=max_micro_batches,
        space=space,
        schedule=schedule,
        cuts=cuts,
        precision=precision,
        attention=attention,
        dropout=dropout,
        sequence_length=sequence_length,
        profile=profile,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        zero2=zero2,
        hybrid_sharding=hybrid_sharding,
        accumulation=accumulation,
        paper=paper,
    )
    request = request_for(model, cluster, setup)
    started = time.perf_counter()
    plan = make_plan(request)
    search_s = time.perf_counter() - started
    if output:
        plan.save(output)
    if as_json:
        opt.print_json({**plan.to_dict(), "search_s": search_s})
        return
    from galvatron.plans.render import plan_view

    opt.show(plan_view(plan), f"search took {search_s * 1e3:.0f} ms")
    if output:
        opt.show(f"written to {output}; 'galvatron explain {output}' says why")
