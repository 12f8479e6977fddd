"""Times parts of work on a device: by a clock on the CPU, by events on a GPU, which is not kept waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

__all__ = ["seconds_of"]

Parts = Callable[[Callable[[], None]], object]
"""Work in parts: it calls its argument after each of them."""


def seconds_of(
    calls: int,
    parts: Parts,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    *,
    lead_in: bool = False,
) -> tuple[float, ...]:
    """Call ``parts`` so many times: the seconds of each part, all calls together; by this clock on the CPU.

    ``lead_in``: with a call before them on a GPU that does not count, for work of several ranks: they meet in it, and
    the host gets ahead of its device, as in training.
    """
    marks: list[list[float]] = []
    if device.type != "cuda":
        for _ in range(calls):
            times = [clock()]
            parts(lambda times=times: times.append(clock()))  # type: ignore[misc]
            marks.append([after - before for before, after in pairwise(times)])
        return tuple(map(sum, zip(*marks, strict=True)))
    torch.cuda.synchronize(device)
    if lead_in:
        parts(lambda: None)
    recorded = [_recorded(parts) for _ in range(calls)]
    torch.cuda.synchronize(device)
    marks = [[before.elapsed_time(after) / 1e3 for before, after in pairwise(run)] for run in recorded]
    return tuple(map(sum, zip(*marks, strict=True)))


def _recorded(parts: Parts) -> list[torch.cuda.Event]:
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    mark()
    parts(mark)
    return events
