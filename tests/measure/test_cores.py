"""Whose the cores were: what others took from our work is told from what they took while we waited."""

from __future__ import annotations

import pytest

from galvatron.processes.cores import Moment, Shares, shares


def _moments(wall_s: float, busy_s: float | None) -> tuple[Moment, Moment]:
    begin = None if busy_s is None else 100.0
    return Moment(0.0, 0.0, begin), Moment(wall_s, 0.0, None if busy_s is None else 100.0 + busy_s)


def test_others_take_half_of_what_works_all_the_time() -> None:
    """Work of 2 s on 4 cores, beside as much of others', lasts 4 s: half of them were lost."""
    assert Shares(cores=4, ours=2.0, others=2.0).lost == pytest.approx(0.5)


def test_nothing_is_taken_from_waiting() -> None:
    """Others have all cores to themselves while we wait for a network, and would have had them anyway."""
    assert Shares(cores=2, ours=0.0, others=2.0).lost == 0.0
    assert Shares(cores=2, ours=0.04, others=1.94).lost <= 0.04


def test_on_cores_that_are_free_nobody_is_in_the_way() -> None:
    """One core of 64 worked for us, two for others: hardly anything is lost."""
    assert Shares(cores=64, ours=1.0, others=2.0).lost < 0.001


def test_alone_nothing_is_lost() -> None:
    assert Shares(cores=2, ours=2.0, others=0.0).lost == 0.0


def test_from_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert shares(*_moments(2.0, 6.0), ours_s=4.0) == Shares(cores=4, ours=2.0, others=1.0)
    assert shares(*_moments(2.0, 3.0), ours_s=4.0).others == 0.0, "clocks tick, so ours may seem more than all"
    assert shares(*_moments(2.0, None), ours_s=4.0).lost == 0.0, "nothing is known"
