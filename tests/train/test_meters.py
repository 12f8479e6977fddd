"""What an iteration's time is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from galvatron.train.meters import IterationTimes


@pytest.mark.parametrize(
    ("device", "follows", "expected"), [("cuda", True, 4.0), ("cuda", False, 3.0), ("cpu", True, 3.0)]
)
def test_what_lies_between_steps_counts_where_they_follow(
    monkeypatch: pytest.MonkeyPatch, device: str, follows: bool, expected: float
) -> None:
    """A GPU goes on meanwhile. What evaluates or saves in between does not count."""
    now = [10.0]
    monkeypatch.setattr("galvatron.train.meters.time.perf_counter", lambda: now[0])
    model: Any = SimpleNamespace(device=torch.device(device))  # of which the first steps need nothing else
    times = IterationTimes(model)
    with times.step(plain=True):
        now[0] += 2.0
    assert times.last_s == 2.0
    now[0] += 1.0
    with times.step(plain=True, follows=follows):
        now[0] += 3.0
    assert times.last_s == expected
