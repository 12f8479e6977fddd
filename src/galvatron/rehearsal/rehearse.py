"""Runs one rank's share of a plan by itself and measures it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from galvatron.models.build import build_meta
from galvatron.models.layer import CutModel
from galvatron.models.registry import cut
from galvatron.plans.plan import Plan
from galvatron.rehearsal.alone import alone_as
from galvatron.rehearsal.memory import CudaMeter, meter_for
from galvatron.rehearsal.weights import CheapWeights
from galvatron.runtime.parallelize import parallelize

__all__ = ["Measured", "rehearse_rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank took for one iteration, communication left out."""

    state_bytes: int
    """Alive between backward and optimizer step: parameters, gradients, optimizer states, whatever else stays."""
    forward_backward_bytes: int
    """Peak over all micro-batches."""
    optimizer_bytes: int
    """Peak of the optimizer step."""
    reserved_bytes: int | None
    """What the caching allocator took from the device; None on the CPU."""
    compute_s: float
    """Forward and backward of all micro-batches, median of the measured iterations."""
    optimizer_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_backward_bytes, self.optimizer_bytes)


def rehearse_rank(plan: Plan, rank: int, *, device: torch.device, steps: int) -> Measured:
    """Run a rank's share of the plan: once to warm up, once for memory, ``steps`` times for time."""
    config = plan.model.config
    assert config is not None
    cut_model = cut(build_meta(config, plan.model.training))
    weights = CheapWeights(cut_model)
    batch = _batch(cut_model, plan)
    meter = meter_for(device)
    with alone_as(rank, plan.cluster.devices):
        with meter:
            model = parallelize(None, plan, weights=weights, device=device)
            optimizer = model.optimizer()
            local = next(model.local_batches([batch]))

            def forward_backward() -> None:
                optimizer.zero_grad()
                model.forward_backward(local)

            forward_backward()
            optimizer.step()
            with meter.phase("forward_backward"):
                forward_backward()
            with meter.phase("optimizer"):
                optimizer.step()
        times = [(_timed(forward_backward, device), _timed(optimizer.step, device)) for _ in range(steps)]
    return Measured(
        state_bytes=meter.phases["optimizer"].start,
        forward_backward_bytes=meter.phases["forward_backward"].peak,
        optimizer_bytes=meter.phases["optimizer"].peak,
        reserved_bytes=meter.reserved if isinstance(meter, CudaMeter) else None,
        compute_s=statistics.median(compute for compute, _ in times),
        optimizer_s=statistics.median(step for _, step in times),
    )


def _batch(cut_model: CutModel, plan: Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = plan.model.training.sequence_length is None
    return cut_model.example(plan.batch, None if image else plan.model.training.sequence_length, generator)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
