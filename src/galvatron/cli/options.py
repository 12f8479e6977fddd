"""Options that several verbs share: one for each field of a setup, and how results are printed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from galvatron.planner.plan.options import help_of, setup_fields

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
    "need_torch",
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
PrecisionKind = Annotated[str | None, typer.Option("--precision", help=help_of("precision"))]
AttentionKind = Annotated[str | None, typer.Option("--attention", help=help_of("attention"))]
Virtual = Annotated[
    int | None, typer.Option("--virtual", help="Share one GPU as so many devices (CUDA MPS): any plan on one GPU.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


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


def need_torch(what: str) -> None:
    """Raise :class:`InvalidInput` where PyTorch and transformers are not installed; imports neither."""
    from importlib.util import find_spec

    from galvatron.core.errors import InvalidInput

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"galvatron {what} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed; pip install 'galvatron[torch]'"
        )


def show(*views: RenderableType) -> None:
    """Print for a person; without colours and at a fixed width when the output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140, no_color=True)
    for view in views:
        console.print(view)


def print_json(value: Any) -> None:
    """Print a value as JSON, indented."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
