"""Options that several verbs share: one for each field of a setup, and how results are printed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron.core.spec import ADAMW, ONE_F_ONE_B, OPTIMIZERS, SCHEDULES

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "AsJson",
    "AttentionKind",
    "ClusterHere",
    "ClusterSource",
    "ModelSource",
    "PrecisionKind",
    "Virtual",
    "print_json",
    "show",
    "takes_setup",
]

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A preset ('galvatron models'), a Hugging Face config.json or folder, or a .toml."
    ),
]
ClusterSource = Annotated[str, typer.Option("--cluster", "-c", help="A preset ('galvatron clusters') or a .toml file.")]
ClusterHere = Annotated[
    str,
    typer.Option("--cluster", "-c", help="A preset ('galvatron clusters'), a .toml file, or auto: measure this one."),
]
PrecisionKind = Annotated[
    str | None, typer.Option("--precision", help="fp32 or bf16 (default: bf16 where the device has it).")
]
AttentionKind = Annotated[str | None, typer.Option("--attention", help="fused (default), eager, or paper.")]
Virtual = Annotated[
    int | None, typer.Option("--virtual", help="Share one GPU as so many devices (CUDA MPS): any plan on one GPU.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


def _switch(help: str, name: str) -> Any:
    return Annotated[bool | None, typer.Option(f"--{name}/--no-{name}", help=help)]


_SCHEDULES = " or ".join(schedule.name for schedule in SCHEDULES)
_OPTIMIZERS = " or ".join(optimizer.name for optimizer in OPTIMIZERS)
_SETUP: dict[str, Any] = {
    "memory": Annotated[str | None, typer.Option(help="Budget of each device: 8GB, 8GiB (default: all it has).")],
    "batch": Annotated[int | None, typer.Option(help="Plan for exactly this global batch.")],
    "batch_step": Annotated[int | None, typer.Option(help="Search batches in steps of this many samples (default 8).")],
    "max_batch": Annotated[int | None, typer.Option(help="Largest batch searched (default 64 for each device).")],
    "max_micro_batches": Annotated[int | None, typer.Option(help="Most micro-batches considered.")],
    "space": Annotated[str, typer.Option(help="full, dp, tp, pp, sdp, 3d, dp+tp or dp+pp.")],
    "schedule": Annotated[str | None, typer.Option(help=f"{_SCHEDULES} (default {ONE_F_ONE_B.name}).")],
    "cuts": Annotated[
        str | None, typer.Option(help="exact (default), or a guideline of the paper: layers, parameters, memory, time.")
    ],
    "precision": PrecisionKind,
    "attention": AttentionKind,
    "dropout": _switch("Default: as the model's configuration.", "dropout"),
    "sequence_length": Annotated[int | None, typer.Option(help="Tokens a sample (default: the model's own).")],
    "optimizer": Annotated[str | None, typer.Option(help=f"{_OPTIMIZERS} (default {ADAMW.name}).")],
    "profile": Annotated[str | None, typer.Option(help="Measured layers (.toml).")],
    "recompute": _switch("Recompute, chosen layer by layer.", "recompute"),
    "sequence_parallel": _switch("Sequence parallelism beside TP.", "sequence-parallel"),
    "zero2": _switch("ZeRO-2 style DP.", "zero2"),
    "hybrid_sharding": _switch("DP over SDP (Takeaway #3 off).", "hybrid-sharding"),
    "accumulation": _switch("Micro-batches without a pipeline.", "accumulation"),
    "paper": Annotated[
        bool,
        typer.Option(
            "--paper",
            help="The paper's setting: GPipe, fp32, no recompute, its attention, space, pruning and cuts by memory.",
        ),
    ],
}
"""The options of a setup, by the names of its fields."""
_DEFAULTS = {"space": "full", "paper": False}


def takes_setup(*leave_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter ``setup`` by one option for each field, except those left out."""
    names = [name for name in _SETUP if name not in leave_out]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            from galvatron.planner.plan.setup import Setup

            said = {name: given.pop(name) for name in names}
            function(**given, setup=Setup(**said))

        # The setup's own type is imported only when a command runs; anything may stand for it here.
        known = {**function.__globals__, "Setup": object}
        own = inspect.signature(function, globals=known, eval_str=True).parameters
        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=_SETUP[name]
            )
            for name in names
        ]
        kept = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values() if each.name != "setup"]
        first = [each for each in kept if each.default is inspect.Parameter.empty]
        rest = [each for each in kept if each.default is not inspect.Parameter.empty]
        parameters = [*first, *options, *rest]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


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
