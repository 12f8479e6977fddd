"""Computation beside communication, against both run in small steps."""

from __future__ import annotations

import numpy as np
import pytest

from galvatron.cost.overlap import Slowdown


def stepped(compute: float, communicate: float, slowdown: Slowdown) -> float:
    """Time until both are done, in steps of a ten-thousandth."""
    step, time = 1e-4, 0.0
    while compute > 0 or communicate > 0:
        both = compute > 0 and communicate > 0
        compute -= step / slowdown.compute if both else step
        communicate -= step / slowdown.communicate if both else step
        time += step
    return time


@pytest.mark.parametrize("compute", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("communicate", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("slowdown", [(1.0, 1.0), (1.3, 1.3), (1.4, 1.0), (1.0, 1.4), (2.5, 1.2)])
def test_equals_both_in_small_steps(compute: float, communicate: float, slowdown: tuple[float, float]) -> None:
    each = Slowdown(*slowdown)
    found = each.overlapped_s(np.array(compute), np.array(communicate))
    assert float(found) == pytest.approx(stepped(compute, communicate, each), abs=5e-4)


def test_one_factor_is_the_paper_s() -> None:
    """σ·min + (max − min)."""
    assert float(Slowdown(1.3, 1.3).overlapped_s(np.array(2.0), np.array(5.0))) == pytest.approx(1.3 * 2 + 3)
