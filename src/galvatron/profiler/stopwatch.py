"""Times parts of work on a device: by a clock on the CPU, by events on a GPU, which is not kept waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["seconds_of"]


def seconds_of(
    calls: int,
    parts: Callable[[Callable[[], None]], object],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Call ``parts`` so many times; it calls its argument after each part. The seconds of each part, all calls together;
    by this clock on the CPU."""
    marks: list[list[float]] = []
    if device.type != "cuda":
        for _ in range(calls):
            times = [clock()]
            parts(lambda times=times: times.append(clock()))  # type: ignore[misc]
            marks.append([after - before for before, after in zip(times, times[1:], strict=False)])
        return tuple(map(sum, zip(*marks, strict=True)))
    torch.cuda.synchronize(device)
    recorded = [_recorded(parts) for _ in range(calls)]
    torch.cuda.synchronize(device)
    marks = [[before.elapsed_time(after) / 1e3 for before, after in zip(run, run[1:], strict=False)] for run in recorded]
    return tuple(map(sum, zip(*marks, strict=True)))


def _recorded(parts: Callable[[Callable[[], None]], object]) -> list[torch.cuda.Event]:
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # type: ignore[no-untyped-call]
        events.append(event)

    mark()
    parts(mark)
    return events
