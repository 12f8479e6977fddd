"""Options that several verbs share: one for each field of a setup, and how results are printed."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.switches import SWITCHES
from galvatron.planner.plan.options import help_of, setup_fields

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "SETUP_PANELS",
    "AsJson",
    "AttentionKind",
    "ClusterHere",
    "ClusterSource",
    "ModelSource",
    "PrecisionKind",
    "Virtual",
    "arranged",
    "checked_file",
    "checked_folder",
    "need_torch",
    "print_json",
    "show",
    "takes_setup",
    "write_file",
]

_PLAIN_WIDTH = 140
"""Where the output is no terminal, and COLUMNS does not say otherwise."""
_LEAST_WIDTH = 40
_WIDTH = re.compile("[0-9]{1,4}")

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A preset ('galvatron models'), a Hugging Face config.json or folder, or a .toml."
    ),
]
ClusterSource = Annotated[
    str, typer.Option("--cluster", "-c", help="rtx4090:4, a100:2x8 ('galvatron clusters'), or a .toml file.")
]
ClusterHere = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="rtx4090:4, a100:2x8 ('galvatron clusters'), a .toml file, or auto: measure here; several by commas.",
    ),
]
PrecisionKind = Annotated[str | None, typer.Option("--precision", help=help_of("precision"))]
AttentionKind = Annotated[str | None, typer.Option("--attention", help=help_of("attention"))]
Virtual = Annotated[
    int | None, typer.Option("--virtual", help="Run this many ranks on one GPU (CUDA MPS), to try any plan on it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _option(name: str, kind: Any) -> Any:
    """A field of a setup as an option: a type that the command line can read, and the field's own help."""
    option = name.replace("_", "-")
    if kind == bool | None:
        return Annotated[bool | None, typer.Option(f"--{option}/--no-{option}", help=help_of(name))]
    text = str in get_args(kind)  # of sizes and paths the command line knows only the text
    return Annotated[str | None if text else kind, typer.Option(f"--{option}", help=help_of(name))]


_SETUP: dict[str, Any] = {name: _option(name, kind) for name, kind in setup_fields().items()}
"""The options of a setup, by the names of its fields."""
_DEFAULTS = {"space": "full", "paper": False}


def takes_setup(*leave_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter ``setup`` by one option for each field, except those left out."""
    names = [name for name in _SETUP if name not in leave_out]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            said: Any = {name: given.pop(name) for name in names}
            function(**given, setup=said)

        own = inspect.signature(function, eval_str=True).parameters
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


def arranged(
    panels: Mapping[str, tuple[str, ...]], aliases: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put a command's options into panels of its help, and give some of them further names."""
    panel_of = {name: panel for panel, names in panels.items() for name in names}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [_arranged(each, panel_of, aliases or {}) for each in signature.parameters.values()]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _arranged(
    parameter: inspect.Parameter, panel_of: Mapping[str, str], aliases: Mapping[str, tuple[str, ...]]
) -> inspect.Parameter:
    kind, *others = get_args(parameter.annotation) or (parameter.annotation,)
    option = next((copy(each) for each in others if hasattr(each, "rich_help_panel")), None)
    if option is None:
        return parameter
    option.rich_help_panel = panel_of.get(parameter.name, option.rich_help_panel)
    if parameter.name in aliases:
        names = option.param_decls or (f"--{parameter.name.replace('_', '-')}",)
        option.param_decls = (*names, *aliases[parameter.name])
    return parameter.replace(annotation=Annotated[kind, option])


SETUP_PANELS: dict[str, tuple[str, ...]] = {
    "Devices": ("cluster", "devices", "node_link", "memory", "virtual"),
    "Batch": ("batch", "batch_tokens", "batch_step", "max_batch", "max_micro_batches", "max_micro_batch"),
    "Model": (
        "precision",
        "attention",
        "dropout",
        "sequence_length",
        "image_size",
        "optimizer",
        "compile",
        "expert_imbalance",
        "profile",
    ),
    "Fine-tuning": ("freeze", "train_only", "lora", "lora_alpha", "lora_targets", "lora_full"),
    "Search": ("space", "schedule", "cuts", "paper", "pipeline", "pin", "forbid", "time_limit"),
    "Extensions of the space (--no-NAME turns one off)": tuple(switch.name for switch in SWITCHES),
}
"""Panels of the help for the options of a setup."""


def need_torch(what: str) -> None:
    """Raise :class:`InvalidInput` where PyTorch and transformers are not installed; imports neither."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"galvatron {what} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed; pip install 'galvatron[torch]'"
        )


def show(*views: RenderableType) -> None:
    """Print for a person; without colours and at a fixed width when the output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        width = os.environ.get("COLUMNS", "")
        width_here = int(width) if _WIDTH.fullmatch(width) and int(width) >= _LEAST_WIDTH else _PLAIN_WIDTH
        console = Console(highlight=False, markup=False, emoji=False, width=width_here, no_color=True)
    for view in views:
        long = isinstance(view, str) and any(len(word) > console.width // 2 for word in view.split())
        console.print(view, soft_wrap=long)  # a path is never broken


def checked_file(name: str | None, suffix: str, what: str) -> None:
    """Whether a file of this name can be written, before minutes are spent on what it is to hold."""
    if name is None:
        return
    if not name.endswith(suffix):
        raise InvalidInput(f"output: {name!r} given; expected a name that ends in {suffix}, such as {what}{suffix}")
    checked_folder(name, "output")


def checked_folder(name: str | None, option: str) -> None:
    """Whether the folder of a file that is to be written exists, and it is no pipe, which nobody may ever read."""
    if name is not None and not Path(name).parent.is_dir():
        raise InvalidInput(f"{option}: cannot write {name!r}: there is no folder {str(Path(name).parent)!r}")
    if name is not None and Path(name).is_fifo() and not name.startswith("/dev/"):
        raise InvalidInput(f"{option}: {name!r} is a pipe; expected a file, or /dev/stdout")


def write_file(name: str | None, content: str) -> None:
    """Write what the user asked for."""
    if name is None:
        return
    try:
        Path(name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"output: cannot write {name!r}: {error.strerror or error}") from error


def print_json(value: Any) -> None:
    """Print a value as JSON, indented."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
