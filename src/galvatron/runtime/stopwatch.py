"""Where a stage's time goes: seconds by name, on the device's own clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the time spent under each name since the last :meth:`take`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans.append((name, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds by name; the next ones are counted anew. Waits for the device."""
        if self._spans:
            torch.cuda.synchronize()
        for name, begin, end in self._spans:
            self._seconds[name] += begin.elapsed_time(end) / 1e3
        self._spans.clear()
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken
