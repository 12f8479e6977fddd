"""Phases of a run: their seconds, and a line for those that take long."""

from __future__ import annotations

import time

import pytest

from galvatron.train import phases
from galvatron.train.phases import Phases
from galvatron.train.report import phases_line


def test_what_takes_long_is_said_once_and_all_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_SILENT_S", 0.05)
    said: list[str] = []
    seen = Phases(said.append)
    with seen.phase("building", "building the model"):
        time.sleep(0.2)
    with seen.phase("planning"):
        pass
    with seen.phase("measuring", silent=True):
        time.sleep(0.2)
    seen.add("starting", 3.0)
    with seen.phase("building", "building the model"):
        pass
    time.sleep(0.1)
    assert said == ["building the model …"]
    assert list(seen.seconds) == ["building", "planning", "measuring", "starting"]
    assert seen.seconds["building"] >= 0.2
    line = phases_line(seen.seconds)
    assert "starting 3.00 s" in line
    assert " in all: " in line


def test_a_phase_that_fails_says_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_SILENT_S", 0.05)
    said: list[str] = []
    with pytest.raises(ValueError), Phases(said.append).phase("building"):
        raise ValueError
    time.sleep(0.1)
    assert said == []
