"""``--config run.toml``: all options of a run in one file, and that file written into the run's folder."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from galvatron.core.errors import InvalidInput

__all__ = ["Config", "config_text", "said_here"]

_NOT_KEPT = frozenset({"config", "resume", "help", "out"})
"""What does not belong to a run that is repeated."""


def _read(context: typer.Context, file: str | None) -> str | None:
    """The file's values take the place of defaults: what the command line says comes first."""
    if file is None:
        return None
    from galvatron.core.files.reader import parse, read_text

    content = parse(read_text(Path(file), "options in TOML"), file, "TOML")
    known = {parameter.name: parameter for parameter in context.command.params if parameter.name not in _NOT_KEPT}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, [each for each in known if each], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "'galvatron train --help' lists them"
            raise InvalidInput(f"{file}: {key} is not an option of this command; {hint}")
        values[name] = _checked(file, key, known[name].type.name, value)
    context.default_map = {**(context.default_map or {}), **values}
    return file


_FLAG, _WHOLE, _NUMBER = (bool, "true or false"), (int, "a whole number"), (int | float, "a number")
_WANTED = {"boolean": _FLAG, "bool": _FLAG, "integer": _WHOLE, "int": _WHOLE, "float": _NUMBER}
"""By the names that click, and its copy in typer, give to types."""


def _checked(file: str, key: str, kind: str, value: Any) -> Any:
    """The value, if the option can have it: a flag is true or false, a number a number."""
    wanted, words = _WANTED.get(kind, (str | int | float, "text"))
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise InvalidInput(f"{file}: {key} is {value!r}; expected {words}")
    return value if kind in _WANTED else str(value)


Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        callback=_read,
        is_eager=True,
        help="Options from a .toml file, such as a run's run.toml; those given here come first.",
    ),
]


def said_here(context: typer.Context) -> dict[str, Any]:
    """The options of the command that is running, as they were given, in a file or on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in _NOT_KEPT}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    return {name: context.params[name] for name in given if context.params[name] is not None}


def config_text(said: dict[str, Any]) -> str:
    """These options as a file that ``--config`` reads."""
    lines = [f"{name} = {_literal(value)}" for name, value in said.items()]
    head = "# The options of this run. Repeat it with: galvatron train --config run.toml --output ANOTHER_FOLDER"
    return "\n".join([head, *lines]) + "\n"


def _literal(value: Any) -> str:
    return repr(value) if type(value) in (int, float) else json.dumps(value, ensure_ascii=False)
