"""A profile is found again under the circumstances it was measured in, and under no others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from galvatron.measure import cache


def test_the_key_changes_with_each_circumstance(monkeypatch: pytest.MonkeyPatch) -> None:
    base = cache.key_of(devices=4)
    assert cache.key_of(devices=4) == base
    assert cache.key_of(devices=8) != base
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert cache.key_of(devices=4) != base
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in (("_version", lambda name: "0"), ("_gpus", lambda: ["another"]), ("_VERSION", 99)):
        with monkeypatch.context() as changed:
            changed.setattr(cache, name, value)
            assert cache.key_of(devices=4) != base, name


def test_it_is_kept_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    path = cache.cached_file("cluster", "abc")
    assert path == tmp_path / "profiles" / "cluster-abc.toml"
    cache.keep(path, "content")
    assert path.read_text() == "content"
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"
    monkeypatch.delenv("GALVATRON_CACHE")
    assert cache.cached_file("cluster", "abc") == Path("~/.cache/galvatron/profiles/cluster-abc.toml").expanduser()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    cache.keep(tmp_path / "profiles" / "x.toml", "content")
