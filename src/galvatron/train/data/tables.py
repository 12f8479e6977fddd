"""Text from tables: Parquet and Arrow files, and datasets as Hugging Face's library saves them.

What reads them is an optional extra; without it an error says what to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput

__all__ = ["extra", "is_saved_dataset", "rows_of_arrow", "rows_of_parquet", "rows_of_saved", "text_of"]

_FIELD = "text"
_ROWS = 1024
_SPLITS = "dataset_dict.json"


def extra(module: str, purpose: str) -> Any:
    """A module of the ``data`` extra."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise InvalidInput(
            f'{purpose} needs {package}, which is not installed; pip install "galvatron[data]"'
        ) from None


def text_of(row: Mapping[str, Any], where: str, name: str = _FIELD) -> str:
    """The text of a row."""
    text = row.get(name)
    if not isinstance(text, str):
        shown = f"is {text!r}" if name in row else f"is missing (it has {', '.join(map(repr, row)) or 'nothing'})"
        raise InvalidInput(f"{where}: the field {name!r} {shown}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{where}: half of a character ({error.object[error.start]!r}) in the text; mend it"
        ) from None
    return text


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote it."""
    return (folder / _SPLITS).is_file() or (folder / "state.json").is_file()


def rows_of_saved(folder: Path, name: str = _FIELD) -> Iterator[str]:
    """Of a dataset with splits, those of ``train``."""
    library = extra("datasets", f"{folder}: reading a Hugging Face dataset")
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes the library raise
        raise InvalidInput(
            f"{folder}: cannot be read as a Hugging Face dataset ({type(error).__name__}: {error}); save it again with "
            "save_to_disk"
        ) from None
    if isinstance(found, library.DatasetDict):
        names = list(found)
        if "train" not in names and len(names) != 1:
            raise InvalidInput(f"{folder}: has splits {', '.join(names)} but no 'train'; give one of its folders")
        found = found["train" if "train" in names else names[0]]
    _need_column(found.column_names, folder, name)
    column = found.select_columns([name])
    return _texts((batch[name] for batch in column.iter(_ROWS)), folder, name)


def rows_of_parquet(path: Path, name: str = _FIELD) -> Iterator[str]:
    """The rows of a Parquet file, batch by batch."""
    parquet = extra("pyarrow.parquet", f"{path}: reading Parquet")
    return _rows(path, lambda: _parquet_batches(parquet.ParquetFile(path), path, name), name)


def rows_of_arrow(path: Path, name: str = _FIELD) -> Iterator[str]:
    """Arrow's stream format, which Hugging Face writes, or its file format."""
    ipc = extra("pyarrow.ipc", f"{path}: reading Arrow")
    return _rows(path, lambda: _arrow_batches(ipc, path, name), name)


def _rows(path: Path, batches: Any, name: str) -> Iterator[str]:
    arrow = extra("pyarrow", f"{path}: reading a table")
    try:
        yield from _texts(batches(), path, name)
    except arrow.ArrowException as error:
        raise InvalidInput(f"{path}: cannot be read ({error}); copy the file anew") from None


def _parquet_batches(file: Any, path: Path, name: str) -> Iterator[list[Any]]:
    _need_column(file.schema_arrow.names, path, name)
    for batch in file.iter_batches(_ROWS, columns=[name]):
        yield batch.column(0).to_pylist()


def _arrow_batches(ipc: Any, path: Path, name: str) -> Iterator[list[Any]]:
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = ipc.open_stream(file)
            batches = iter(reader)
        _need_column(reader.schema.names, path, name)
        for batch in batches:
            yield batch.column(reader.schema.names.index(name)).to_pylist()


def _need_column(names: list[str], where: Path, name: str) -> None:
    if name not in names:
        raise InvalidInput(
            f"{where}: has columns {', '.join(names)}; expected one named {name!r}; rename the column, or name it "
            "(--text-field)"
        )


def _texts(batches: Iterator[list[Any]], where: Path, name: str) -> Iterator[str]:
    number = 0
    for batch in batches:
        for text in batch:
            yield text_of({name: text}, f"{where}, row {number}", name)
            number += 1
