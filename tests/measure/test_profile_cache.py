"""A profile is found again under the circumstances it was measured in, and under no others."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron.core.files.clusters import dump_cluster
from galvatron.families import load_cluster
from galvatron.measure import cache, clusters
from galvatron.measure.figures import Quality


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


@pytest.mark.parametrize(("spread", "said"), [(0.26, True), (0.24, False)])
def test_noisy_figures_are_named_whenever_they_are_used_again(
    spread: float, said: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    source = cache.provenance("2 × cpu, gloo", Quality(6, spread, 0.05))
    kept = cache.cached_file("cluster", cache.key_of(devices=4, rounds=6))
    cache.keep(kept, dump_cluster(replace(load_cluster("cpu-4"), source=source)))
    with caplog.at_level(logging.WARNING):
        assert clusters.profile_cluster(4).source == source
    assert ("typical spread 26%" in caplog.text and "--fresh" in caplog.text) == said
