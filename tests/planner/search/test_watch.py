"""A search that is stopped gives a plan that fits, and a gap within which the true optimum lies."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from longer import longer
from search_oracles import brute_search, check_plan, limited, random_problem

import galvatron
from galvatron.cli.progress import shown_search
from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.setup import request_for
from galvatron.planner.search import Watch, outer, search
from galvatron.planner.search import watch as watching
from galvatron.planner.search.watch import OutOfTime


class _StopsAfter(Watch):
    """Stops the search at its nth look at the clock."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.left = looks

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OutOfTime


def _gaps(trials: int) -> list[Fraction]:
    """Of searches stopped early and late: how far the true optimum is above what was found. Each lies within what the
    search itself says."""
    gaps = []
    for trial in range(trials):
        problem = limited(np.random.default_rng((50, trial)), random_problem(np.random.default_rng((51, trial)), 150))
        expected = brute_search(problem)
        if expected is None:
            continue
        best = Fraction(expected.batch, expected.iteration_ns)
        for looks in (0, 1, 3, 9, 27):
            try:
                found = search(replace(problem, watch=_StopsAfter(looks)))
            except InvalidInput as error:
                assert "no plan was found in that time" in str(error)  # noqa: PT017
                continue
            assert found is not None
            check_plan(problem, found)
            reached = Fraction(found.batch, found.solved.iteration_ns)
            assert reached <= best
            said = max(float(reached), found.proof.rest_bound)
            assert float(best) <= said * (1 + 1e-12), (trial, looks)
            gaps.append(best / reached - 1)
    return gaps


@pytest.mark.parametrize("trials", [10, longer(100)])
def test_wherever_it_is_stopped_the_bound_holds(trials: int) -> None:
    gaps = _gaps(trials)
    assert len(gaps) > 2 * trials
    assert any(gap > 0 for gap in gaps), "the instances test too little: what is stopped is optimal all the same"


def test_brute_force_notices_a_bound_that_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: here the search says of every plan that nothing is left."""
    right: Any = outer.Proof
    monkeypatch.setattr(outer, "Proof", lambda *facts: right(*facts[:-1], 0.0))
    with pytest.raises(AssertionError):
        _gaps(10)


def test_a_plan_that_is_not_proven_says_so(tmp_path: Path) -> None:
    """In the file, and in words."""
    from rich.console import Console

    from galvatron.planner.plan.render import plan_view

    setup = Setup(batch=32, memory="4GiB")
    stopped = galvatron.plan("bert-large", "titan-rtx-8", **Setup(batch=32, memory="4GiB", time_limit=1e-9))
    proven = galvatron.plan("bert-large", "titan-rtx-8", **setup)
    assert stopped.certificate is not None
    assert stopped.certificate.gap > 0
    assert stopped.certificate.lower_bound_s <= proven.iteration_s <= stopped.iteration_s
    stopped.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == stopped
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan_view(stopped))
    assert f"not proven optimal: within {stopped.certificate.gap:.2%} of the best plan" in console.export_text()


def test_a_limit_that_is_none_of_time_is_refused() -> None:
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="time-limit"):
            request_for("bert-tiny", "cpu-4", Setup(time_limit=limit))


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    limits = (None, 1000.0)
    plans = [make_plan(request_for("bert-tiny", "cpu-4", Setup(batch=8, time_limit=limit))) for limit in limits]
    assert plans[0] == plans[1]


def test_only_a_long_search_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("galvatron.planner.search.watch.time.monotonic", lambda: now)
    said: list[tuple[float, float | None]] = []
    watch = Watch(None, lambda elapsed_s, gap: said.append((elapsed_s, gap)))
    for now in (0.2, 0.9, 1.1, 1.2, 2.0):  # noqa: B007
        watch.check()
        watch.reached(0.25)
    assert said == [(1.1, 0.25), (2.0, 0.25)]


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that is written over, and taken away at the end."""
    with shown_search() as tell:
        assert tell is None
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with shown_search() as tell:
        assert tell is not None
        tell(1.2, None)
        tell(2.4, 0.031)
    first, second, rest = terminal.getvalue().split("\r\033[K")[1:]
    assert first == "searching: 1 s, no plan yet"
    assert second == "searching: 2 s, best plan so far within 3.10% of the best"
    assert rest == ""


def test_a_search_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_FIRST_S", 0.0)
    monkeypatch.setattr(watching, "_EVERY_S", 0.0)
    said: list[float | None] = []
    request = request_for("bert-large", "titan-rtx-8", Setup(memory="4GiB", batch=32, schedule="gpipe"))
    make_plan(request, lambda _, gap: said.append(gap))
    assert said[0] is None
    assert all(gap is None or gap > 0 for gap in said)
