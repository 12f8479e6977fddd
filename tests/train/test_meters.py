"""What an iteration's time is."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from galvatron.runtime.pipeline.run import PassTimer
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
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    model: Any = SimpleNamespace(device=torch.device(device))  # of which the first steps need nothing else
    times = IterationTimes(model)
    with times.step(plain=True, followed=follows):
        now[0] += 2.0
    assert times.last_s == 2.0
    now[0] += 1.0
    with times.step(plain=True, followed=True):
        now[0] += 3.0
    assert times.last_s == expected
    assert len(waited) == (device == "cuda" and not follows)


def test_what_is_evaluated_between_steps_is_no_work_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("galvatron.train.meters.time.perf_counter", lambda: now[0])
    timer = PassTimer(torch.device("cpu"))
    model: Any = SimpleNamespace(device=torch.device("cpu"), timed=lambda: nullcontext(timer))
    times = IterationTimes(model)
    for _ in range(4):
        with times.step(plain=True, followed=False), timer("forward"):
            now[0] += 1.0
        with timer("forward"):
            now[0] += 5.0
    assert [work for work, *_ in times._parts] == [1.0, 1.0]
