"""Which iterations of a measured plan count."""

from __future__ import annotations

from prediction_runs import Iteration, Run


def _run(*iterations: tuple[float, float]) -> Run:
    return Run(iterations=[Iteration(wall_s=wall, disturbed=disturbed) for wall, disturbed in iterations])


def test_all_count_where_none_was_disturbed() -> None:
    """The first ones are not better than the others."""
    assert _run((1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (9.0, 0.0)).iteration_s == 2.5


def test_the_most_disturbed_do_not_count() -> None:
    assert _run((8.0, 0.5), (1.0, 0.0), (8.0, 0.5), (3.0, 0.0), (2.0, 0.0)).iteration_s == 2.0


def test_what_others_took_is_left_out() -> None:
    assert _run((4.0, 0.5), (4.0, 0.25), (4.0, 0.75)).iteration_s == 2.0
