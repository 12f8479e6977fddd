"""Runs plans on the profiler's ranks, for ``prediction.py``: a module of its own, so that the ranks can import it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from galvatron.plans.plan import Plan

if TYPE_CHECKING:
    from galvatron.profiler.crew import Crew


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One timed iteration."""

    wall_s: float
    disturbed: float
    """Part of the cores that others took."""

    @property
    def ours_s(self) -> float:
        return self.wall_s * (1 - self.disturbed)


@dataclass(kw_only=True)
class Run:
    """What a plan really took."""

    iterations: list[Iteration] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Bytes of tensors, of each rank."""
    reserved: list[int] = field(default_factory=list)
    """Bytes that a GPU's allocator held for them."""

    @property
    def iteration_s(self) -> float:
        quiet = sorted(self.iterations, key=lambda one: one.disturbed)
        return statistics.median(one.ours_s for one in quiet[: max(3, len(quiet) // 2)])


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """Runs plans on the profiler's ranks."""

    devices: int
    plans: dict[str, Plan]
    rounds: int
    steps: int

    def prepare(self) -> None:
        from galvatron.rehearsal import rehearse  # noqa: F401

    def measure(self, crew: Crew) -> dict[str, Run]:
        from torch.distributed import destroy_process_group

        runs = {name: Run() for name in self.plans}
        crew.join()
        for number in range(self.rounds):
            for place, (name, plan) in enumerate(self.plans.items()):
                crew.report(number * len(self.plans) + place, self.rounds * len(self.plans), name)
                self._time(plan, runs[name], crew)
        if crew.device.type == "cpu":
            for name, plan in self.plans.items():
                runs[name].peaks = self._weighed(plan, crew)
        destroy_process_group()
        return runs

    def _time(self, plan: Plan, run: Run, crew: Crew) -> None:
        import torch

        from galvatron.models.build import build_meta
        from galvatron.models.registry import cut
        from galvatron.profiler.cores import Moment, shares
        from galvatron.rehearsal.weights import CheapWeights
        from galvatron.runtime.parallelize import parallelize

        assert plan.model.config is not None
        cut_model = cut(build_meta(plan.model.config, plan.model.training))
        older_bytes = _fresh_count(crew)
        model = parallelize(None, plan, weights=CheapWeights(cut_model), device=crew.device)
        optimizer = model.optimizer()
        length = plan.model.training.sequence_length
        batch = cut_model.example(plan.batch, length, torch.Generator().manual_seed(0))
        local = next(model.local_batches([batch]))
        for step in range(self.steps + 1):
            crew.meet()
            before = Moment.now()
            model.forward_backward(local)
            optimizer.step()
            optimizer.zero_grad()
            crew.wait_for_device()
            after = Moment.now()
            everyone = crew.gather([after.wall_s - before.wall_s, after.own_s - before.own_s])
            others = crew.gather(shares(before, after, sum(own for _, own in everyone)).disturbed)
            taken = statistics.fmean(others) if crew.device.type == "cpu" else 0.0
            if step:
                run.iterations.append(Iteration(wall_s=max(wall for wall, _ in everyone), disturbed=taken))
        if crew.device.type == "cuda":  # whose allocator counts by itself
            run.peaks = crew.gather(torch.cuda.max_memory_allocated() - older_bytes)
            run.reserved = crew.gather(torch.cuda.max_memory_reserved() - older_bytes)
        del model, optimizer, local
        _drop_groups()

    def _weighed(self, plan: Plan, crew: Crew) -> list[int]:
        from galvatron.rehearsal.rehearse import measure_rank

        peak = measure_rank(plan, device=crew.device, steps=0).peak_bytes
        _drop_groups()
        return crew.gather(peak)


def _fresh_count(crew: Crew) -> int:
    """Count a GPU's peaks from here on; bytes that were there before, with what matrix products keep for themselves
    (which is in the cluster's reserved bytes)."""
    import torch

    if crew.device.type == "cpu":
        return 0
    given = torch.ones(8, 8, device=crew.device, requires_grad=True)
    torch.autograd.backward((given @ given).sum())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _drop_groups() -> None:
    """Give back the groups of a plan: each has threads and sockets of its own."""
    import gc

    import torch.distributed as dist

    gc.collect()
    if dist.get_backend() == "nccl":  # which has few, and waits for all members when one is given back
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
