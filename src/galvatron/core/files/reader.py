"""Reads the files that people write: TOML or JSON, checked by pydantic, with one line of error for each problem.

A line names the file, the path of the field, the value cut short, and what is expected. pydantic is imported only where
a file is checked: a plan for a preset needs no check, and importing pydantic takes longer than finding that plan.
"""

from __future__ import annotations

import difflib
import json
import re
import stat
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from galvatron.core.errors import InvalidInput, OutOfRange

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["field_path", "invalid", "naming", "parse", "read_text", "shown", "validate"]

_Model = TypeVar("_Model", bound="BaseModel")
_LONGEST_SHOWN = 60
"""Characters of a value that a message repeats: a file may hold a megabyte where a name should be."""
_MOST_PROBLEMS = 50
_MOST_BYTES = 2**28
"""Of a file: a plan for a thousand devices has a few million."""
_DEEP_KEY = re.compile(r"""^\s*\[*\s*(?:[\w"'-]+\s*\.\s*){500}""", re.MULTILINE)
"""A key of so many parts takes tomllib a time that grows with their square."""
_PREFIX = re.compile(r"^(Input should be|Value error,|\w+ should have) ")
"""How pydantic's messages start; what follows is what is expected."""


def read_text(path: Path, what: str) -> str:
    """The text of a file; ``what`` says in errors what it should hold, such as "a cluster in TOML"."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # reading a pipe may never end
            raise InvalidInput(f"{path}: is a pipe or a device, not a file; expected {what}")
        if about.st_size > _MOST_BYTES:
            raise InvalidInput(f"{path}: has {about.st_size} bytes; expected {what}, of at most {_MOST_BYTES}")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file; expected {what}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: byte {error.start} is not UTF-8 text; expected {what}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path}: cannot be read ({reason}); expected {what}") from None


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Errors about what a file holds begin with the file's name."""
    try:
        yield
    except InvalidInput as error:
        raise type(error)(f"{file}: {error}") from None


def parse(text: str, file: str, language: Literal["TOML", "JSON"]) -> Any:
    """The content of a file; ``file`` is its name in errors."""
    if language == "TOML" and _DEEP_KEY.search(text):
        raise InvalidInput(f"{file}: is nested too deep to be read as {language}")
    try:
        return tomllib.loads(text) if language == "TOML" else json.loads(text, parse_constant=_no_constant)
    except ValueError as error:  # integers of thousands of digits too
        raise InvalidInput(f"{file}: is not {language}: {error}; correct the file there") from None
    except RecursionError:
        raise InvalidInput(f"{file}: is nested too deep to be read as {language}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def validate(model: type[_Model], content: object, file: str) -> _Model:
    """The content of a file as an object of a pydantic model, or one error that tells all problems."""
    from pydantic import ValidationError

    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise invalid(error, file, model) from None


def invalid(error: ValidationError, file: str, model: type[BaseModel] | None = None) -> InvalidInput:
    """pydantic's errors in our words, a line each; a model's fields say what is missing and which keys are known."""
    problems = error.errors(include_url=False)
    lines = [f"{file}: {_explained(problem, model)}" for problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"{file}: has {len(problems) - _MOST_PROBLEMS} more problems, of which the first are above")
    return InvalidInput("\n".join(lines))


def shown(value: object) -> str:
    """A value for an error message, cut short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"{value[:_LONGEST_SHOWN]!r}… ({len(value)} characters)"
    return repr(value)


def field_path(location: Sequence[int | str]) -> str:
    """Where a value stands in a file, such as ``levels[1].bandwidth``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            plain = part.isidentifier() and len(part) <= _LONGEST_SHOWN
            path += f".{part if plain else shown(part)}"
    return path.removeprefix(".") or "the file"


def _explained(problem: ErrorDetails, model: type[BaseModel] | None) -> str:
    kind, location, field = problem["type"], problem["loc"], field_path(problem["loc"])
    if kind == "missing":
        return f"{field} is missing; {_about(model, location) or 'it is required'}"
    if kind == "extra_forbidden":
        known = list(_table(model, location[:-1]).model_fields) if model else []
        close = difflib.get_close_matches(str(location[-1])[:_LONGEST_SHOWN], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        return f"{field} is not a known key; {hint}"
    if isinstance(problem.get("ctx", {}).get("error"), OutOfRange):  # of a table, which names its field
        return f"{field}: {_PREFIX.sub('', problem['msg'])}"
    expected = f"expected {_PREFIX.sub('', problem['msg']).partition(' after validation')[0]}"
    if kind == "model_type" and model:
        expected = f"expected a table with the keys {', '.join(_table(model, location).model_fields)}"
    elif kind == "list_type":
        expected = _about(model, location) or expected
    return f"{field} is {shown(problem['input'])}; {expected}"


def _about(model: type[BaseModel] | None, location: Sequence[int | str]) -> str:
    """What a field's description says is expected, if it has one."""
    field = _table(model, location[:-1]).model_fields.get(str(location[-1])) if model else None
    return f"expected {field.description}" if field and field.description else ""


def _table(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    """The model of the table at a location."""
    for key in location:
        if isinstance(key, str):
            model = _model_in(model.model_fields[key].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation: itself, the item of a list, or what an optional field holds."""
    if hasattr(annotation, "model_fields"):
        found: type[BaseModel] = annotation
        return found
    return next(filter(None, map(_model_in, get_args(annotation))), None)
