"""Runs one rank's share of a plan in this process and measures it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from galvatron.core.spec import Precision
from galvatron.families.build import build_meta
from galvatron.families.generic.image_examples import example_of
from galvatron.families.layer import LayeredModel
from galvatron.families.registry import layered_model
from galvatron.measure.rehearsal.alone import alone_as, kernels_for
from galvatron.measure.rehearsal.least import least_bytes
from galvatron.measure.rehearsal.memory import CudaMeter, meter_for
from galvatron.measure.rehearsal.results import Measured
from galvatron.measure.rehearsal.weights import CheapWeights
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.parallelize import parallelize

__all__ = ["measure_rank", "rehearse_rank"]


def rehearse_rank(plan: Plan, rank: int, *, device: torch.device, steps: int) -> Measured:
    """What this rank of the plan takes, without the others. A process should rehearse one rank only."""
    with alone_as(rank, plan.cluster.devices):
        return measure_rank(plan, device=device, steps=steps)


def measure_rank(plan: Plan, *, device: torch.device, steps: int) -> Measured:
    """Run this process's share of the plan: once to warm up, once for memory, ``steps`` times for time (which is not a
    number if there are none).

    The process group may be a real one. Memory is counted from before the model is built; the batch is older.
    """
    assert plan.model.config is not None
    generic = plan.model.family == "generic"
    stock = build_meta(plan.model.config, plan.model.training, as_named=generic)
    layered = layered_model(stock, example_of(stock, plan.model.training), generic=generic)
    weights = CheapWeights(layered)
    batch = _batch(layered, plan)
    meter = meter_for(device)
    with kernels_for(device), meter:
        # On a CPU, which has no TF32, what takes the same memory; and there may be no others to compare with.
        dtype = torch.float32 if plan.model.training.precision is Precision.TF32 and device.type == "cpu" else None
        model = parallelize(None, plan, weights=weights, device=device, dtype=dtype, check=False)
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

    # Afterwards with the device's own kernels.
    def iteration() -> None:
        forward_backward()
        optimizer.step()

    times = [(_timed(forward_backward, device), _timed(optimizer.step, device)) for _ in range(steps)]
    return Measured(
        state_bytes=meter.phases["optimizer"].start,
        forward_backward_bytes=meter.phases["forward_backward"].peak,
        optimizer_bytes=meter.phases["optimizer"].peak,
        reserved_bytes=meter.reserved if isinstance(meter, CudaMeter) else None,
        compute_s=statistics.median(compute for compute, _ in times) if times else math.nan,
        optimizer_s=statistics.median(step for _, step in times) if times else math.nan,
        # Last, for it leaves nothing that could go on.
        least_bytes=least_bytes(iteration, device) - meter.before if isinstance(meter, CudaMeter) else None,
    )


def _batch(layered: LayeredModel, plan: Plan) -> dict[str, torch.Tensor]:
    return layered.example(plan.batch, plan.model.training.sequence_length, torch.Generator().manual_seed(0))


def _timed(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
