"""A hundred ways to get a cluster file wrong: each is refused, with the field named."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster_text import VALID, refusal, write
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import load_cluster

Place = tuple[str | int, ...]


def places(content: Any, at: Place = ()) -> list[Place]:
    """The path of every value in a parsed file, tables and lists included."""
    found: list[Place] = [at] if at else []
    items: Iterable[tuple[str | int, Any]]
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        found += places(value, (*at, key))
    return found


PLACES = places(tomllib.loads(VALID))
TABLES: list[Place] = [(), ("device",), ("levels", 0), ("levels", 1)]
OPTIONAL = {"overlap_slowdown", "bf16", "layer_overhead", "transfer_bandwidth"}

# Wrong for any field: no text of a name's length, no number in a range, no list of tables.
garbage = st.one_of(
    st.sampled_from(["nan", "inf", "-inf", "-1", "-0.5", "1979-05-27", "12:00:00", "[[]]", "[[1], [2]]"]),
    st.sampled_from(['""', '"\\u0000"', '"\\n\\n"', "{ a = { b = 1 } }", "[{ units = 2 }]"]),
    st.integers(5000, 200_000).map(lambda length: f'"{"x" * length}"'),
    st.integers(2, 400).map(lambda depth: "[" * depth + "]" * depth),
    st.integers(17, 300).map(lambda digits: "0x" + "f" * digits),
)
# Wrong for any field but a name.
wrong_quantities = st.sampled_from(
    ["-5GB", "5 parsecs", "NaN", "infGB/s", "1e999", "1e308PB", "8 GB 8", "１GB", "0x10"]
)


class Raw:
    """A value that is TOML already."""

    def __init__(self, text: str) -> None:
        self.text = text


def rendered(content: Any) -> str:
    """TOML of a parsed file, tables inline; raw text stands for itself."""
    if isinstance(content, Raw):
        return content.text
    if isinstance(content, dict):
        return "{ " + ", ".join(f"{rendered(key)} = {rendered(value)}" for key, value in content.items()) + " }"
    if isinstance(content, list):
        return "[" + ", ".join(map(rendered, content)) + "]"
    return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")


def changed(place: Place, change: Callable[[Any, Any], None]) -> str:
    """The valid file with a change applied to the parent of a place."""
    content = tomllib.loads(VALID)
    parent: Any = content
    for key in place[:-1]:
        parent = parent[key]
    change(parent, place[-1])
    return "\n".join(f"{rendered(key)} = {rendered(value)}" for key, value in content.items())


many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def test_the_unchanged_file_survives_the_rendering(tmp_path: Path) -> None:
    """Else every mutation would be refused for the wrong reason."""
    text = changed(("name",), lambda parent, key: None)
    assert load_cluster(write(tmp_path, text)) == load_cluster(write(tmp_path, VALID))


@given(
    st.tuples(st.sampled_from(PLACES), garbage)
    | st.tuples(st.sampled_from([place for place in PLACES if place[-1] != "name"]), wrong_quantities.map(repr))
)
@many
def test_a_wrong_value_is_refused_and_its_field_named(tmp_path: Path, mutation: tuple[Place, str]) -> None:
    place, value = mutation
    text = changed(place, lambda parent, key: parent.__setitem__(key, Raw(value)))
    field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")
    message = refusal(tmp_path, text)
    assert f"{field} is " in message or f"{field}[" in message or f"{field}." in message


@given(st.sampled_from([place for place in PLACES if place[-1] not in OPTIONAL and isinstance(place[-1], str)]))
@many
def test_a_dropped_key_is_missed(tmp_path: Path, place: Place) -> None:
    text = changed(place, lambda parent, key: parent.__delitem__(key))
    assert f"{place[-1]} is missing" in refusal(tmp_path, text)


@given(st.sampled_from(TABLES), st.text(max_size=200), st.integers() | st.text(max_size=20) | st.booleans())
@many
def test_an_unknown_key_is_never_ignored(tmp_path: Path, table: Place, key: str, value: int | str | bool) -> None:
    assume(key not in {place[-1] for place in PLACES} | {"source"})
    text = changed((*table, key), lambda parent, added: parent.__setitem__(added, value))
    assert "is not a known key" in refusal(tmp_path, text)


@given(
    st.sampled_from(TABLES), st.sampled_from(sorted({str(place[-1]) for place in PLACES if isinstance(place[-1], str)}))
)
@many
def test_a_key_in_the_wrong_table_is_never_ignored(tmp_path: Path, table: Place, key: str) -> None:
    assume((*table, key) not in PLACES and (*table, key) != ("levels", 0, "transfer_bandwidth"))
    text = changed((*table, key), lambda parent, added: parent.__setitem__(added, 3))
    assert f"{key} is not a known key" in refusal(tmp_path, text)


@given(st.integers(0, VALID.index('latency = "9us"')))
@many
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    truncated = VALID[:length]
    assume(not truncated.rstrip().endswith('latency = "4us"'))  # one whole node is a cluster too
    refusal(tmp_path, truncated)


@given(st.binary(max_size=400) | st.text(max_size=400).map(lambda text: text.encode("utf-8", "replace")))
@many
def test_noise_is_refused(tmp_path: Path, content: bytes) -> None:
    refusal(tmp_path, content)


@given(st.integers(0, len(VALID) - 1), st.characters(codec="utf-8"))
@many
def test_one_changed_letter_is_refused_or_harmless(tmp_path: Path, at: int, letter: str) -> None:
    """Some letters may change (a name, a digit); none may end in anything but a cluster or a refusal."""
    text = VALID[:at] + letter + VALID[at + 1 :]
    with suppress(InvalidInput):
        assert load_cluster(write(tmp_path, text)).devices >= 1
        return
    refusal(tmp_path, text)
