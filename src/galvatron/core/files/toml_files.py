"""Facts in TOML files: those that come with the package, by name, and the user's own, by path."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from pathlib import Path
from typing import TypeVar

from galvatron.core.errors import InvalidInput
from galvatron.core.files.toml_fields import Place, shown
from galvatron.core.files.toml_tables import Table

__all__ = ["load_named", "parse_text", "preset_names"]

_T = TypeVar("_T")


def preset_names(folder: str) -> tuple[str, ...]:
    """The names that a folder of presets knows."""
    files = resources.files(__package__).joinpath("presets", folder).iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_named(source: str | Path, folder: str, what: str, table: Table[_T]) -> _T:
    """What ``source`` names: the path of a ``.toml`` file, or a preset of the folder."""
    path, name = Path(source), str(source)
    if path.suffix == ".toml":
        return parse_text(_read(path, what), name, table)
    names = preset_names(folder)
    if name in names:
        preset = resources.files(__package__).joinpath("presets", folder, f"{name}.toml")
        return parse_text(preset.read_text(encoding="utf-8"), f"{name}.toml", table)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}."
    raise InvalidInput(f"unknown {what} {shown(name)}; {hint} The path of a .toml file will also do")


def parse_text(content: str, file: str, table: Table[_T]) -> _T:
    """An object from the text of a file; ``file`` is its name in errors."""
    try:
        parsed = tomllib.loads(content)
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise InvalidInput(f"{file}: is not TOML: {error}; correct the file there") from None
    except RecursionError:
        raise InvalidInput(f"{file}: is nested too deep to be read; expected plain tables") from None
    return table.read(parsed, Place(file))


def _read(path: Path, what: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file; expected the path of a {what} in TOML") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: byte {error.start} is not UTF-8 text; expected a {what} in TOML") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InvalidInput(f"{path}: cannot be read ({error}); expected a {what} in TOML") from None
