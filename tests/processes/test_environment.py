"""What ranks find set: ours, unless the user has set it."""

from __future__ import annotations

import os

import pytest

from galvatron.processes.environment import defaults_if_unset


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIMALLOC_PURGE_DELAY", "KINETO_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert defaults_if_unset(OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99") == {
        "MIMALLOC_PURGE_DELAY": "-1",
        "KINETO_LOG_LEVEL": "99",
    }
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "10")
    assert defaults_if_unset() == {}


def test_ranks_are_launched_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from galvatron.train import launch

    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    with launch._environment(4):
        assert os.environ["MIMALLOC_PURGE_DELAY"] == "-1"
    assert "MIMALLOC_PURGE_DELAY" not in os.environ
