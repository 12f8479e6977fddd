"""Rows of tables: lines of JSON, Parquet, Arrow and CSV files, folders of them, and saved Hugging Face datasets.

All but JSON is read by Hugging Face's ``datasets``, an optional extra; without it an error says what to install. Lines
of JSON are read here: an error names the line, and the library would give each message the fields of all others, empty,
which chat templates can tell from absent ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput

__all__ = ["Files", "Row", "Rows", "extra", "files_in", "rows_in"]

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""Of ``datasets``, by how files end."""
_JSON, _CSV = ".jsonl", ".csv"
_ROWS = 1024
_SPLITS = "dataset_dict.json"
_SPLIT_NAMES = re.compile(r"(?:^|[^a-z])(train|training|test|testing|validation|valid|val|dev|eval)(?:[^a-z]|$)")


@dataclass(frozen=True, slots=True)
class Row:
    """Fields of one row."""

    where: str
    """For errors: the file, and the line or row in it."""
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Files:
    """Files of one kind, in an order that is the same everywhere."""

    root: Path
    files: tuple[Path, ...]

    @property
    def suffix(self) -> str:
        return self.files[0].suffix

    @property
    def name(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.root)

    @property
    def key(self) -> str:
        """Changes when a file does; found without reading them."""
        digest = hashlib.sha256(os.fsencode(self.root.resolve()))
        for path in self.files:
            facts = path.stat()
            name = os.fsencode(path.relative_to(self.root))
            digest.update(b"\0" + name + f"\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Rows:
    """Rows in a fixed order."""

    files: Files
    saved: bool = False
    """Whether ``save_to_disk`` wrote the folder."""

    @property
    def name(self) -> str:
        return str(self.files.root) if self.saved else self.files.name

    @property
    def key(self) -> str:
        return self.files.key

    def __iter__(self) -> Iterator[Row]:
        if self.saved:
            return _numbered(self.name, lambda: _saved(self.files.root))
        if self.files.suffix == _JSON:
            return (row for path in self.files.files for row in _json_lines(path))
        return (row for path in self.files.files for row in _numbered(str(path), partial(_read, path)))


def rows_in(path: Path) -> Rows | None:
    """The rows of a file or folder; None: it holds plain text."""
    if path.is_dir() and ((path / _SPLITS).is_file() or (path / "state.json").is_file()):
        return Rows(Files(path, tuple(_visible(path))), saved=True)
    found = files_in(path)
    return None if found.suffix == ".txt" else Rows(found)


def files_in(path: Path) -> Files:
    """The files that a path means: itself, or all of one kind below a folder."""
    known = (".txt", _JSON, *_BUILDERS, _CSV)
    if path.is_file():
        if path.suffix not in known:
            raise InvalidInput(f"data {str(path)!r}: expected a file ending in {', '.join(known)}, or a folder")
        return Files(path.parent, (path,))
    files = [file for file in _visible(path) if file.suffix in known]
    kinds = sorted({file.suffix for file in files})
    if not files:
        raise InvalidInput(
            f"data {str(path)!r}: the folder has no files ending in {', '.join(known)} and was not written by "
            "save_to_disk of a Hugging Face dataset; give a folder with text (class folders of images are for image "
            "models)"
        )
    if len(kinds) > 1:
        raise InvalidInput(
            f"data {str(path)!r}: the folder has files ending in {' and '.join(kinds)}; give a file, or a folder with "
            "files of one kind"
        )
    _check_one_split(path, files)
    return Files(path, tuple(files))


def _check_one_split(folder: Path, files: list[Path]) -> None:
    """A folder as it is downloaded may have test data beside training data, which must not be trained on."""
    splits: dict[str, Path] = {}
    for file in files:
        found = _SPLIT_NAMES.search(str(file.relative_to(folder)).lower())
        if found:
            splits.setdefault(found[1][:3], file)
    if len(splits) > 1:
        shown = ", ".join(str(file.relative_to(folder)) for file in splits.values())
        raise InvalidInput(
            f"data {str(folder)!r}: the folder has files of several splits ({shown}); give the file or folder of one, "
            "and that of another as --eval-data"
        )


def extra(module: str, purpose: str) -> Any:
    """A module of the ``data`` extra."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise InvalidInput(
            f'{purpose} needs {package}, which is not installed; pip install "galvatron[data]"'
        ) from None


def _visible(folder: Path) -> list[Path]:
    """All files below a folder in an order that is the same everywhere."""
    found = (file for file in folder.rglob("*") if file.is_file())
    inside = [(file.relative_to(folder).parts, file) for file in found]
    return [file for parts, file in sorted(inside) if not any(part.startswith(".") for part in parts)]


def _json_lines(path: Path) -> Iterator[Row]:
    """Each line is an object."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise InvalidInput(f"{where}: is not JSON ({error}); expected an object") from None
                except RecursionError:
                    raise InvalidInput(f"{where}: is nested too deep to be read; expected an object") from None
                if not isinstance(row, dict):
                    raise InvalidInput(f"{where}: is {line.strip()[:40]!r}; expected an object")
                yield Row(where, row)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8 text (byte {error.object[error.start]:#04x}); convert it") from None
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error}); check the file and its permissions") from None


def _numbered(name: str, read: Callable[[], Iterator[Mapping[str, Any]]]) -> Iterator[Row]:
    number = -1
    try:
        for number, row in enumerate(read()):
            yield Row(f"{name}, row {number}", row)
    except InvalidInput:
        raise
    except Exception as error:  # whatever a damaged file makes the library raise
        said = str(error).strip().partition("\n")[0]
        raise InvalidInput(
            f"{name}: cannot be read after {number + 1} rows ({type(error).__name__}: {said}); copy or write it anew"
        ) from None


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    """Row by row, so that nothing is converted and kept besides the tokens."""
    if path.suffix == _CSV:
        return _read_csv(path)
    library = extra("datasets", f"{path}: reading a table")
    _keep_silent(library)
    table = library.load_dataset(_BUILDERS[path.suffix], data_files=[str(path)], split="train", streaming=True)
    return map(_present, table)


def _read_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    """Each value is text as it stands, "null" and "12" too. By pandas: ``datasets`` uses it too, but leaves files
    open."""
    library = extra("pandas", f"{path}: reading a table")
    with library.read_csv(path, chunksize=_ROWS, dtype=str, keep_default_na=False, encoding="utf-8") as chunks:
        for chunk in chunks:
            yield from chunk.to_dict("records")


def _saved(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Of a dataset with splits, those of ``train``."""
    library = extra("datasets", f"{folder}: reading a Hugging Face dataset")
    found = library.load_from_disk(str(folder))
    if isinstance(found, library.DatasetDict):
        names = list(found)
        if "train" not in names and len(names) != 1:
            raise InvalidInput(f"{folder}: has splits {', '.join(names)} but no 'train'; give one of its folders")
        found = found["train" if "train" in names else names[0]]
    return map(_present, found)


def _keep_silent(library: Any) -> None:
    """What it would say of a damaged file is said here."""
    library.logging.set_verbosity(library.logging.CRITICAL)


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without_absent(own) for name, own in row.items()}


def _without_absent(value: Any) -> Any:
    """In a table all objects have the fields of each other, empty: templates must not see those."""
    if isinstance(value, dict):
        return {name: _without_absent(own) for name, own in value.items() if own is not None or name == "content"}
    return [_without_absent(own) for own in value] if isinstance(value, list) else value
