"""Results on disk: made once, never seen half made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.train.data.tokens import built_once


def test_one_builds_while_others_wait(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    builders: list[str] = []
    found: dict[str, str] = {}

    def ask(name: str) -> None:
        def build(folder: Path) -> None:
            builders.append(name)
            (folder / "part").write_text("half")
            begun.set()
            assert may_end.wait(30)
            (folder / "part").write_text("whole")

        found[name] = (built_once(tmp_path, "key", build) / "part").read_text()

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two", "three")]
    threads[0].start()
    assert begun.wait(30)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.2)
    assert not found, "nobody goes on with half a result"
    assert not (tmp_path / "key").exists()
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert builders == ["one"]
    assert found == dict.fromkeys(("one", "two", "three"), "whole")


def test_a_failed_builder_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise InvalidInput("no text")

    for _ in range(2):
        with pytest.raises(InvalidInput, match="no text"):
            built_once(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    folder = built_once(tmp_path, "key", lambda folder: None)
    assert folder.is_dir()


def test_what_a_killed_builder_left_is_not_used(tmp_path: Path) -> None:
    """Its draft and its lock file are there, nobody holds the lock."""
    (tmp_path / "key.abc").mkdir()
    (tmp_path / "key.abc" / "part").write_text("half")
    (tmp_path / "key.lock").touch()

    def build(folder: Path) -> None:
        (folder / "part").write_text("whole")

    folder = built_once(tmp_path, "key", build)
    assert (folder / "part").read_text() == "whole"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"file.*give another cache folder"):
        built_once(tmp_path / "file", "key", lambda folder: None)
