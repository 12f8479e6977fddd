"""Runs plans for ``prediction.py``: CPU processes are the profiler's ranks, which import this module, and are started
once; virtual GPUs have fresh ranks for each plan, whose groups would else share queues to the GPU with older ones."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron.core.errors import GalvatronError
from galvatron.planner.plan.plan import Plan
from galvatron.processes.job import Progress

if TYPE_CHECKING:
    from galvatron.processes.peers import Peers


sys.path.append(str(Path(__file__).parent / "paper"))  # whose fresh ranks these are
_MOST_S = 60.0
"""For the timed iterations of a plan."""


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
        """The median of the least disturbed half, and of all that are no more disturbed: of all where none was."""
        quiet = sorted(one.disturbed for one in self.iterations)
        limit = quiet[max(3, len(quiet) // 2) - 1]
        return statistics.median(one.ours_s for one in self.iterations if one.disturbed <= limit)


def run_on_gpus(plans: Mapping[str, Plan], rounds: int, steps: int, output: Path, progress: Progress) -> dict[str, Run]:
    """Run each plan on as many virtual GPUs as it is for."""
    from fresh_ranks import FreshRanks
    from rank_job import MeasureJob

    runs = {name: Run() for name in plans}
    devices = next(iter(plans.values())).cluster.devices
    with FreshRanks(devices, gpu=True) as ranks:
        for number in range(rounds):
            for place, (name, plan) in enumerate(plans.items()):
                progress(number * len(plans) + place, rounds * len(plans), name)
                job = MeasureJob(system=name, program="galvatron", plan=plan, timed_s=_MOST_S, most=steps)
                outcome = ranks.run(job, limit_s=2 * _MOST_S)
                if outcome.status != "ok":
                    raise GalvatronError(f"{name}: {outcome.status}: {outcome.message}")
                together = zip(*(rank.iterations_s for rank in outcome.results), strict=True)
                runs[name].iterations += [Iteration(wall_s=max(walls), disturbed=0.0) for walls in together]
                runs[name].peaks = [rank.peak_bytes for rank in outcome.results]
                runs[name].reserved = [rank.allocator_bytes for rank in outcome.results]
                if number + 1 == rounds:
                    append(output, name, plan, runs[name])
    return runs


def append(output: Path, name: str, plan: Plan, run: Run) -> None:
    """Add a plan's line to the results."""
    cluster = plan.cluster.facts
    line = {
        "devices": cluster.devices,
        "cluster": cluster.source,
        "contention": cluster.compute_contention,
        "slowdown": cluster.overlap_slowdown,
        "message_contention": cluster.message_contention,
        "plan": name,
        "predicted_s": plan.iteration_s,
        "measured_s": run.iteration_s,
        "iterations": [asdict(one) for one in run.iterations],
        "predicted_bytes": plan.memory_bytes - cluster.reserved_bytes,
        "measured_bytes": max(run.peaks),
        "allocator_bytes": max(run.reserved, default=None),
    }
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """Runs plans on the profiler's ranks, CPU processes."""

    devices: int
    plans: dict[str, Plan]
    rounds: int
    steps: int
    output: Path
    """Each plan's line is added to this file as soon as it is measured."""

    def prepare(self) -> None:
        from galvatron.measure.rehearsal import rehearse  # noqa: F401

    def measure(self, peers: Peers) -> dict[str, Run]:
        from torch.distributed import destroy_process_group

        runs = {name: Run() for name in self.plans}
        peers.join()
        for number in range(self.rounds):
            for place, (name, plan) in enumerate(self.plans.items()):
                peers.report(number * len(self.plans) + place, self.rounds * len(self.plans), name)
                self._time(plan, runs[name], peers)
                if number + 1 < self.rounds:
                    continue
                runs[name].peaks = self._weighed(plan, peers)
                if peers.rank == 0:
                    append(self.output, name, plan, runs[name])
        destroy_process_group()
        return runs

    def _time(self, plan: Plan, run: Run, peers: Peers) -> None:
        import torch

        from galvatron.families.build import build_meta
        from galvatron.families.registry import layered_model
        from galvatron.measure.rehearsal.weights import CheapWeights
        from galvatron.processes.cores import Moment, shares
        from galvatron.runtime.parallelize import parallelize

        assert plan.model.config is not None
        layered = layered_model(build_meta(plan.model.config, plan.model.training))
        model = parallelize(None, plan, weights=CheapWeights(layered), device=peers.device)
        optimizer = model.optimizer()
        length = plan.model.training.sequence_length
        batch = layered.example(plan.batch, length, torch.Generator().manual_seed(0))
        local = next(model.local_batches([batch]))
        for step in range(self.steps + 1):
            peers.meet()
            before = Moment.now()
            model.forward_backward(local)
            optimizer.step()
            optimizer.zero_grad()
            after = Moment.now()
            everyone = peers.gather([after.wall_s - before.wall_s, after.own_s - before.own_s])
            others = peers.gather(shares(before, after, sum(own for _, own in everyone)).disturbed)
            if step:
                slowest = max(wall for wall, _ in everyone)
                run.iterations.append(Iteration(wall_s=slowest, disturbed=statistics.fmean(others)))
        del model, optimizer, local
        _drop_groups()

    def _weighed(self, plan: Plan, peers: Peers) -> list[int]:
        from galvatron.measure.rehearsal.rehearse import measure_rank

        peak = measure_rank(plan, device=peers.device, steps=0).peak_bytes
        _drop_groups()
        return peers.gather(peak)


def _drop_groups() -> None:
    """Give back the groups of a plan: each has threads and sockets of its own."""
    import gc

    import torch.distributed as dist

    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
