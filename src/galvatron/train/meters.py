"""Memory and time of a run, measured while it trains."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from galvatron.measure.rehearsal.memory import CpuMeter
from galvatron.processes.cores import Moment, machine, shares
from galvatron.processes.stopping import Agreement
from galvatron.processes.world import shortages
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.pipeline.run import PassTimer
from galvatron.train.report import RankTimes

__all__ = ["IterationTimes", "PeakMemory", "used_bytes"]

_METERED_STEPS = 2
"""From before the model is built to the end of this step on the CPU: then optimizer states exist, and it was in use."""
_FIRST, _LATER = "first iteration", "iterations"
"""The first one also compiles."""


def used_bytes(device: torch.device) -> int:
    """Most that tensors had on a GPU since the last phase; on the CPU what the process has of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Peak bytes of tensors in iterations, as the plan counts them. Made before the model.

    A GPU's allocator counts by itself. What building, evaluating, comparing and saving need is kept apart from what
    iterations need (:attr:`by_phase`). On the CPU allocations are followed until the second step ends; the copies that
    gloo makes count as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter: CpuMeter | None = None
        self.by_phase: dict[str, int] = {}
        """Peaks of the phases so far. Empty on the CPU."""
        self.held = 0
        """Most that the allocator had of a GPU in iterations."""
        self.shortages = 0
        """How often it ran short in iterations but the first."""
        self._short_before = shortages(device)
        self._peak = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._meter = CpuMeter()
            self._meter.__enter__()
            self._phase = self._meter.phase("training")
            self._phase.__enter__()

    def phase_done(self, phase: str) -> None:
        """What was allocated since the last call counts for ``phase``."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self.by_phase[phase] = max(peak, self.by_phase.get(phase, 0))
            if phase in (_FIRST, _LATER):
                self.held = max(self.held, torch.cuda.max_memory_reserved(self._device))
            short = shortages(self._device)
            if phase == _LATER:
                self.shortages += short - self._short_before
            self._short_before = short
            torch.cuda.reset_peak_memory_stats(self._device)

    def step_done(self, step_of_process: int) -> None:
        self.phase_done(_FIRST if step_of_process == 1 else _LATER)
        if self._meter is not None and step_of_process >= _METERED_STEPS:
            self._phase.__exit__(None, None, None)
            self._meter.__exit__(None, None, None)
            self._peak = self._meter.phases["training"].peak
            self._meter = None

    @property
    def bytes(self) -> int | None:
        """None while it is not known."""
        if self._device.type == "cuda":
            return max(self.by_phase.get(_FIRST, 0), self.by_phase.get(_LATER, 0)) or None
        return self._peak or None

    @property
    def elsewhere(self) -> int:
        """The peak of building, evaluating, comparing and saving."""
        return max((peak for phase, peak in self.by_phase.items() if phase not in (_FIRST, _LATER)), default=0)


_UNSETTLED = 2
"""First steps of a process, which are slower."""
_PARTS_OF = 10
"""Steps of which the parts are taken."""


class IterationTimes:
    """Of one process."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._stack = ExitStack()
        self._pass_timer: PassTimer | None = None
        self._iterations: list[float] = []
        self._parts: list[tuple[float, float, float, float]] = []
        self._count = 0
        self._data_s = 0.0
        self._last_end: float | None = None
        """When the step before this one ended, if this one follows it at once."""
        self._began: Moment | None = None
        self._ended: Moment | None = None

    @contextmanager
    def step(self, *, plain: bool, followed: bool) -> Iterator[None]:
        """One iteration; ``plain``: nothing is traced in it, so that its time counts; ``followed``: the next one comes
        at once. A GPU may then still be updating weights when this one ends, and on GPUs what this process does until
        the next, such as writing figures down, counts for that."""
        counts = plain and self._count >= _UNSETTLED
        if counts and len(self._parts) < _PARTS_OF and self._pass_timer is None:
            self._pass_timer = self._stack.enter_context(self._model.timed())
        if counts and self._began is None:
            self._began = Moment.now()
        if self._pass_timer is not None:
            self._pass_timer.take()  # what was evaluated since
        started = time.perf_counter() if self._last_end is None else self._last_end
        yield
        cuda = self._model.device.type == "cuda"
        if cuda and not followed:
            torch.cuda.synchronize(self._model.device)  # the update is this step's, whatever comes then
        ended = time.perf_counter()
        self.last_s, self._last_end = ended - started, ended if cuda and followed else None
        self._count += 1
        taken = self._pass_timer.take() if self._pass_timer is not None else {}
        if not counts:
            return
        self._iterations.append(self.last_s)
        self._ended = Moment.now()
        if self._pass_timer is not None:
            self._note(taken)
        if len(self._parts) == _PARTS_OF:
            self._stack.close()
            self._pass_timer = None

    @contextmanager
    def data(self) -> Iterator[None]:
        """While the next batch is fetched."""
        started = time.perf_counter()
        yield
        self._data_s = time.perf_counter() - started

    def _note(self, taken: dict[str, float]) -> None:
        work_s = taken.get("forward", 0.0) + taken.get("backward", 0.0)
        waiting_s = taken.get("receive", 0.0)
        self._parts.append((work_s, waiting_s, self._data_s, self.last_s - work_s - waiting_s - self._data_s))

    @property
    def iteration_s(self) -> float | None:
        """The median; None if there were too few steps."""
        return statistics.median(self._iterations) if self._iterations else None

    def of_all_ranks(self, memory: PeakMemory, agreement: Agreement) -> list[RankTimes]:
        """What each rank measured; all ranks must ask."""
        medians = [statistics.median(part) for part in zip(*self._parts, strict=True)] or [0.0] * 4
        sizes = memory.bytes or 0, memory.elsewhere, memory.held, memory.shortages
        mine = torch.tensor([*medians, *map(float, sizes)], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=agreement.group)
        listed = [[float(value) for value in each] for each in everyone]
        return [RankTimes(work, waiting, data, rest, *map(int, sizes)) for work, waiting, data, rest, *sizes in listed]

    def disturbed(self, agreement: Agreement) -> float:
        """The part of this machine's cores that other programs had meanwhile; all ranks must ask."""
        began, ended = self._began, self._ended
        own_s = 0.0 if began is None or ended is None else ended.own_s - began.own_s
        here = int.from_bytes(hashlib.sha256(machine().encode()).digest()[:6])
        mine = torch.tensor([own_s, float(here)], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=agreement.group)
        if began is None or ended is None:
            return 0.0
        ours_s = sum(float(seconds) for seconds, where in everyone if int(where) == here)
        return shares(began, ended, ours_s).disturbed
