"""Computation beside communication, against both run in small steps."""

from __future__ import annotations

import numpy as np
import pytest

from galvatron.planner.cost.communication import overlapped_s


def stepped(compute: float, communicate: float, slowdown: float) -> float:
    """Time until both are done, in steps of a ten-thousandth."""
    step, time = 1e-4, 0.0
    while compute > 0 or communicate > 0:
        done = step / slowdown if compute > 0 and communicate > 0 else step
        compute -= done
        communicate -= done
        time += step
    return time


@pytest.mark.parametrize("compute", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("communicate", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("slowdown", [1.0, 1.3, 2.5])
def test_equals_both_in_small_steps(compute: float, communicate: float, slowdown: float) -> None:
    found = overlapped_s(np.array(compute), np.array(communicate), slowdown)
    assert float(found) == pytest.approx(stepped(compute, communicate, slowdown), abs=5e-4)
