"""The command line: one file a verb. Parsing and printing only; the work is done by the packages below.

Heavy imports (numpy, rich, pydantic) happen inside the verbs, so that ``galvatron --help`` answers at once.
"""

from __future__ import annotations

import os
import sys

import typer

from galvatron.cli import (
    check,
    checkpoints,
    clusters,
    compare,
    explain,
    export,
    models,
    plan,
    profile,
    rehearse,
    strategies,
    train,
)
from galvatron.core.errors import GalvatronError

__all__ = ["app", "main"]

app = typer.Typer(
    name="galvatron",
    help="Finds the provably fastest way to train a Transformer on the GPUs you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in (plan, train, explain, compare, check, rehearse, checkpoints, export, strategies, models, clusters):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)
app.add_typer(profile.app, name="profile")


def main() -> None:
    """Run a command; an error meant for users is printed without a traceback, with its exit status."""
    try:
        app(prog_name="galvatron")
    except GalvatronError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_status)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
