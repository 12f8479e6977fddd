"""The command line: one file a verb. Parsing and printing only; the work is done by the packages below.

Heavy imports (numpy, rich, pydantic) happen inside the verbs, so that ``galvatron --help`` answers at once.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Annotated

import typer

from galvatron import __version__
from galvatron.cli import (
    check,
    checkpoints,
    clusters,
    compare,
    doctor,
    explain,
    export,
    export_plan,
    models,
    plan,
    price,
    profile,
    rehearse,
    strategies,
    studio,
    train,
)
from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.processes.environment import quiet

__all__ = ["app", "main"]

app = typer.Typer(
    name="galvatron",
    help="Finds the provably fastest way to train a Transformer on the GPUs you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_LONGEST_NAME = 200
"""Of a file, as an error shows it."""
_PANELS = {
    "Plan": (plan, explain, compare, strategies, export_plan, price, studio),
    "Train": (train, checkpoints, export),
    "Try out": (check, rehearse, doctor),
    "What is known": (models, clusters),
}
for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        _epilog = "\n\n".join(getattr(_verb, "EXAMPLES", ()))
        _name = _verb.__name__.rpartition(".")[2].replace("_", "-")
        app.command(_name, rich_help_panel=_panel, epilog=_epilog or None)(_verb.command)
app.add_typer(profile.app, name="profile", rich_help_panel="Plan")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"galvatron {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Finds the provably fastest way to train a Transformer on the GPUs you have."""


_PLAIN = str.maketrans(
    {"█": "#", "░": ".", "–": "-", "−": "-", "×": "x", "…": "...", "→": "->", "·": "*", "µ": "u", "─": "-", "│": "|",
     "├": "|", "└": "`", "≤": "<=", "≥": ">=", "²": "^2"}
)  # fmt: skip
"""What our own texts have, in ASCII."""


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """What a stream writes for characters that its encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_PLAIN)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


def main() -> None:
    """Run a command; an error meant for users is printed without a traceback, with its exit status."""
    quiet()
    codecs.register_error("plain", _in_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")  # names of files may be any bytes, and a terminal may know ASCII alone
    try:
        app(prog_name="galvatron")
    except GalvatronError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_status)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except UnicodeEncodeError as error:
        print(f"error: {error.object!r:.200}: is not UTF-8, so it cannot be written; rename it", file=sys.stderr)  # noqa: T201
        sys.exit(InvalidInput.exit_status)
    except OSError as error:
        print(f"error: {_about_files(error)}", file=sys.stderr)  # noqa: T201
        sys.exit(InvalidInput.exit_status)


def _about_files(error: OSError) -> str:
    """What the system says of a file or folder, which is seldom a defect of ours."""
    said = error.strerror or str(error)
    if error.filename is not None:
        name = str(error.filename)
        short = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}… ({len(name)} characters)"
        return f"{short}: {said}; check the name and its permissions"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working folder was deleted; go to another one"
    return f"{type(error).__name__}: {said}"
