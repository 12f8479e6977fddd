"""Options that several verbs share, and how they become a setup."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Accumulation",
    "AsJson",
    "AttentionKind",
    "BatchStep",
    "ClusterSource",
    "CutsRule",
    "Dropout",
    "FixedBatch",
    "HybridSharding",
    "MaxBatch",
    "MaxMicroBatches",
    "ModelSource",
    "Paper",
    "PrecisionKind",
    "ProfileFile",
    "Recompute",
    "ScheduleKind",
    "SequenceLength",
    "SequenceParallel",
    "Zero2",
    "print_json",
    "show",
]

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A preset ('galvatron models'), a Hugging Face config.json or folder, or a .toml."
    ),
]
ClusterSource = Annotated[str, typer.Option("--cluster", "-c", help="A preset ('galvatron clusters') or a .toml file.")]
FixedBatch = Annotated[int | None, typer.Option("--batch", help="Plan for exactly this global batch.")]
BatchStep = Annotated[int | None, typer.Option(help="Search batches in steps of this many samples (default 8).")]
MaxBatch = Annotated[int | None, typer.Option(help="Largest batch searched (default 64 for each device).")]
MaxMicroBatches = Annotated[int | None, typer.Option(help="Most micro-batches considered.")]
ScheduleKind = Annotated[str | None, typer.Option("--schedule", help="gpipe or 1f1b (default 1f1b).")]
CutsRule = Annotated[
    str | None,
    typer.Option("--cuts", help="exact (default), or a guideline of the paper: layers, parameters, memory, time."),
]
PrecisionKind = Annotated[
    str | None, typer.Option("--precision", help="fp32 or bf16 (default: bf16 where the device has it).")
]
AttentionKind = Annotated[str | None, typer.Option("--attention", help="fused (default), eager, or paper.")]
Dropout = Annotated[bool | None, typer.Option("--dropout/--no-dropout", help="Default: as the model's configuration.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens a sample (default: the model's own).")]
ProfileFile = Annotated[str | None, typer.Option("--profile", help="Measured layer times (.toml).")]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper", help="The paper's setting: GPipe, fp32, no recompute, eager attention, its space and pruning."
    ),
]
Recompute = Annotated[bool | None, typer.Option("--recompute/--no-recompute", help="Recompute, chosen layer by layer.")]
SequenceParallel = Annotated[
    bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Sequence parallelism beside TP.")
]
Zero2 = Annotated[bool | None, typer.Option("--zero2/--no-zero2", help="ZeRO-2 style DP.")]
HybridSharding = Annotated[
    bool | None, typer.Option("--hybrid-sharding/--no-hybrid-sharding", help="DP over SDP (Takeaway #3 off).")
]
Accumulation = Annotated[
    bool | None, typer.Option("--accumulation/--no-accumulation", help="Micro-batches without a pipeline.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


def show(*views: RenderableType) -> None:
    """Print for a person; without colours and at a fixed width when the output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140, no_color=True)
    for view in views:
        console.print(view)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
