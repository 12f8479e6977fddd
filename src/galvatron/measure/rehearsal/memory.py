"""Bytes of tensors on one device: how many are alive, and the most there ever were, phase by phase.

On CUDA the caching allocator counts by itself. On the CPU every allocation and release is read off PyTorch's profiler,
which sees the allocator itself: also the storages that FSDP2 empties and fills behind the tensors' back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["CpuMeter", "CudaMeter", "Meter", "PhaseBytes", "meter_for"]


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Bytes over what there was before the meter was started."""

    start: int
    peak: int


class Meter(AbstractContextManager["Meter"], ABC):
    """Measures from entering it; what each phase took is known after leaving it. A phase's name is used once."""

    def __init__(self) -> None:
        self.phases: dict[str, PhaseBytes] = {}

    @abstractmethod
    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the measured time."""


def meter_for(device: torch.device) -> Meter:
    """The meter that can measure this device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


class CudaMeter(Meter):
    """Asks the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.reserved = 0
        """Most bytes the allocator took from the device: the peak and what it could not reuse."""
        self.before = 0
        """Bytes of tensors that were there before it was entered."""

    def __enter__(self) -> CudaMeter:
        # The library of matrix products takes its workspace from the same allocator when it is first used.
        square = torch.ones(16, 16, device=self._device)
        torch.mm(square, square)
        del square
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self.before = torch.cuda.memory_allocated(self._device)
        self._reserved_before = torch.cuda.memory_reserved(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reserved = torch.cuda.max_memory_reserved(self._device) - self._reserved_before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        start = torch.cuda.memory_allocated(self._device) - self.before
        yield
        torch.cuda.synchronize(self._device)
        self.phases[name] = PhaseBytes(start, torch.cuda.max_memory_allocated(self._device) - self.before)


@dataclass(frozen=True, slots=True)
class _Span:
    """When a phase was, since 1970."""

    begin_ns: int
    end_ns: int


class CpuMeter(Meter):
    """Follows every allocation of this thread and of the backward passes it starts."""

    _PREFIX = "meter: "

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[str, _Span] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> CpuMeter:
        self._profile.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.stop()
        if error is None:
            finished: Any = self._profile.profiler
            events = finished.kineto_results.experimental_event_tree()
            self.phases = _phases(list(_flattened(events)), self._spans, self._PREFIX)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_ns = time.time_ns()
        with record_function(self._PREFIX + name):
            yield
        self._spans[name] = _Span(begin_ns, time.time_ns())


def _flattened(events: list[Any]) -> Iterator[Any]:
    waiting = list(reversed(events))
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(reversed(event.children))


def _phases(events: list[Any], timed: Mapping[str, _Span], prefix: str) -> dict[str, PhaseBytes]:
    """Replay allocations and releases in order of time. Phases are as the profiler saw them; one that it lost (rarely,
    on a busy machine) is where our own clock has it."""
    seen = {event.name.removeprefix(prefix): event for event in events if event.name.startswith(prefix)}
    spans = {**timed, **{name: _Span(event.start_time_ns, event.end_time_ns) for name, event in seen.items()}}
    starts = dict.fromkeys(spans, 0)
    peaks = dict.fromkeys(spans, 0)
    alive: dict[int, int] = {}
    total = 0
    changes = [
        event for event in events if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu"
    ]
    for event in sorted(changes, key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            total += size - alive.get(address, 0)  # what was there was released in a thread that is not followed
            alive[address] = size
        elif address in alive:  # else it is older than the meter
            total -= alive.pop(address)
        for name, span in spans.items():
            if event.start_time_ns < span.begin_ns:
                starts[name] = total
            elif event.start_time_ns <= span.end_ns:
                peaks[name] = max(peaks[name], total)
    return {name: PhaseBytes(starts[name], max(starts[name], peaks[name])) for name in spans}
