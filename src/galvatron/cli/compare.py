"""``galvatron compare``: all spaces side by side over several budgets."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt

__all__ = ["command"]


def command(
    model: opt.ModelSource,
    cluster: opt.ClusterSource,
    memory: Annotated[str, typer.Option(help="Budgets, separated by commas: 8GB,12GB,16GB,20GB.")],
    batch: opt.FixedBatch = None,
    batch_step: opt.BatchStep = None,
    max_batch: opt.MaxBatch = None,
    max_micro_batches: opt.MaxMicroBatches = None,
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
    as_json: opt.AsJson = False,
) -> None:
    """Show the best plan of every space at every budget, as in the paper's main table."""
    from galvatron.plans.compare import compare
    from galvatron.plans.setup import Setup, request_for
    from galvatron.units import parse_bytes

    budgets = [parse_bytes(part, where="memory") for part in memory.split(",")]
    setup = Setup(
        memory=max(budgets),
        batch=batch,
        batch_step=batch_step,
        max_batch=max_batch,
        max_micro_batches=max_micro_batches,
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
    comparison = compare(request_for(model, cluster, setup), budgets)
    if as_json:
        opt.print_json(
            [
                {
                    "space": cell.space,
                    "memory_bytes": cell.memory_bytes,
                    "throughput": cell.plan.throughput if cell.plan else None,
                    "batch": cell.plan.batch if cell.plan else None,
                    "micro_batches": cell.plan.micro_batches if cell.plan else None,
                    "pipeline_degree": cell.plan.pipeline_degree if cell.plan else None,
                    "why_not": None if cell.plan else cell.why_not,
                }
                for row in comparison.rows
                for cell in row
            ]
        )
        return
    from galvatron.plans.render import comparison_view

    opt.show(comparison_view(comparison))
