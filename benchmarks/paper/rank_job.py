"""What one rank of a run does: join the others, build the system's program, time some iterations, weigh them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from galvatron.planner.plan.plan import Plan
from galvatron.processes.environment import settle

__all__ = ["MeasureJob", "Measured", "prepare"]

_PAUSE_S = 0.5
"""After the first iteration: DDP makes its buckets anew in the second, but messages of the first hold the old ones
until a thread of PyTorch's sees that they are done. Now and then there was no memory for both."""
_FEWEST = 2
"""Iterations, besides one to warm up, so that they have a spread."""


def prepare() -> None:
    """Import what ranks need, all that transformers loads late included; nothing here may use CUDA."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")  # the paper's fp32: no TF32
    import programs  # noqa: F401
    from galvatron.families.build import read_config, stock_class

    for family in ("bert", "vit", "t5", "swin"):
        stock_class(read_config({"model_type": family}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One rank's figures."""

    iterations_s: tuple[float, ...]
    peak_bytes: int
    allocator_bytes: int
    shortages: int
    device: str


@dataclass(frozen=True, kw_only=True)
class MeasureJob:
    """A run of the table, for each of its ranks."""

    system: str
    program: str
    plan: Plan
    timed_s: float
    """What the timed iterations may take in all."""
    most: int = 3
    """Timed iterations, where there is time for so many."""

    @property
    def tensor_bytes(self) -> int:
        """What the budget leaves for tensors."""
        return self.plan.memory_budget_bytes - self.plan.cluster.facts.reserved_bytes

    def run(self, rank: int) -> Measured:
        import torch

        from galvatron.processes.world import cap_memory, join, own_device

        warnings.simplefilter("ignore")  # the same from every rank
        join(in_turn=len(self.plan.stages) == 1)
        device = own_device()
        cap_memory(device, self.tensor_bytes)
        torch.manual_seed(0)
        return self._on_gpu(device) if device.type == "cuda" else self._on_cpu(device)

    def _on_gpu(self, device: Any) -> Measured:
        import torch

        from galvatron.processes.world import shortages, workspace_bytes

        step = self._program(device)
        settle()
        workspaces = workspace_bytes(device)
        torch.cuda.empty_cache()  # of the whole model that stock programs start from
        torch.cuda.reset_peak_memory_stats(device)
        iterations = self._timed(step, lambda: torch.cuda.synchronize(device), device)
        properties = torch.cuda.get_device_properties(device)
        return Measured(
            iterations_s=iterations,
            peak_bytes=torch.cuda.max_memory_allocated(device) - workspaces,
            allocator_bytes=torch.cuda.max_memory_reserved(device) - workspaces,
            shortages=shortages(device),
            device=f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        )

    def _on_cpu(self, device: Any) -> Measured:
        """A CPU has no limit on tensors, so that of the budget is held against what the meter saw."""
        import torch

        from galvatron.measure.rehearsal.memory import meter_for

        meter = meter_for(device)
        with meter:
            step = self._program(device)
            step()
            with meter.phase("iteration"):
                step()
        settle()
        peak = meter.phases["iteration"].peak
        if peak > self.tensor_bytes:
            raise torch.OutOfMemoryError(f"out of memory: {peak} bytes of tensors, {self.tensor_bytes} allowed")
        iterations = self._timed(step, nullcontext, device)
        return Measured(
            iterations_s=iterations, peak_bytes=peak, allocator_bytes=peak, shortages=0, device="CPU process"
        )

    def _program(self, device: Any) -> Callable[[], Any]:
        from programs import build

        return build(self.system, self.program, self.plan, device)

    def _timed(self, step: Callable[[], Any], finish: Callable[[], Any], device: Any) -> tuple[float, ...]:
        """Iterations after one to warm up, as many as all ranks have time for."""
        import torch
        import torch.distributed as dist

        def one() -> float:
            dist.barrier()
            begin = time.perf_counter()
            step()
            finish()
            return time.perf_counter() - begin

        slowest = torch.tensor([one()], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        time.sleep(_PAUSE_S)
        count = min(max(int(self.timed_s / slowest.item()), _FEWEST), self.most)
        return tuple(one() for _ in range(count))
