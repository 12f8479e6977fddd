"""From a request to a plan: runs the search and writes its result out in full."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B, Cluster, ModelProfile, ModelSpec, Schedule
from galvatron.planner.cost import GALVATRON, Conventions, CostModel
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import (
    FORMAT_VERSION,
    Certificate,
    ClusterFacts,
    MemoryUse,
    ModelFacts,
    PlannedLayer,
    PlannedStage,
    SpaceFacts,
    TimeUse,
)
from galvatron.planner.search import CutRule, Optimum, Problem, search
from galvatron.planner.space import EXTENDED, Switches, space_named

__all__ = ["Request", "default_batch_step", "try_plan"]

_SAMPLES_PER_DEVICE = 64
"""Largest batch searched by default, for each device: beyond it throughput hardly grows."""
_LARGEST_BATCH = 1 << 22
_MOST_BATCHES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to plan for. Fields left at None get the cluster's or the search's own defaults."""

    model: ModelSpec
    cluster: Cluster
    memory_bytes: int | None = None
    """Budget of each device; None: all of its memory."""
    batch: int | None = None
    """Plan for exactly this global batch; None: search batches."""
    batch_step: int | None = None
    max_batch: int | None = None
    space: str = "full"
    switches: Switches | None = None
    """Extensions; None: all of them, hybrid sharding only where islands differ in speed."""
    schedule: Schedule = ONE_F_ONE_B
    cuts: CutRule = CutRule.EXACT
    conventions: Conventions = GALVATRON
    profile: ModelProfile | None = None
    max_micro_batches: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "batch_step", "max_batch", "max_micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name.replace('_', '-')}: {value} given; it must be at least 1")
        for name in ("batch", "max_batch", "batch_step"):
            value = getattr(self, name)
            if value is not None and value > _LARGEST_BATCH:
                raise InvalidInput(
                    f"{name.replace('_', '-')}: {value} given; at most {_LARGEST_BATCH} samples are planned"
                )
        if not self.batches:
            raise InvalidInput(
                f"max-batch: {self.max_batch} given, but batches are searched in steps of {self.batch_step}, so there "
                "is none; give a smaller batch-step or a larger max-batch"
            )
        if len(self.batches) > _MOST_BATCHES:
            raise InvalidInput(
                f"batch-step: more than {_MOST_BATCHES} batches would be searched; give a larger batch-step or a "
                "smaller max-batch"
            )
        if self.batch is not None and (self.batch_step is not None or self.max_batch is not None):
            raise InvalidInput("batch and batch-step (or max-batch) contradict each other: a fixed batch has no steps")
        if self.budget_bytes > self.cluster.device.memory_bytes:
            raise InvalidInput(
                f"memory: {self.budget_bytes} bytes given, but a {self.cluster.device.name} has only "
                f"{self.cluster.device.memory_bytes}; give at most that"
            )
        if self.budget_bytes <= 0:
            raise InvalidInput("memory: the budget must be positive")
        space_named(self.space)

    @property
    def budget_bytes(self) -> int:
        return self.cluster.device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def batches(self) -> tuple[int, ...]:
        if self.batch is not None:
            return (self.batch,)
        step = self.batch_step or default_batch_step(self.cluster.devices)
        limit = self.max_batch or max(_SAMPLES_PER_DEVICE * self.cluster.devices, step)
        return tuple(range(step, min(limit, step * (_MOST_BATCHES + 1)) + 1, step))

    @property
    def effective_switches(self) -> Switches:
        if self.switches is not None:
            return self.switches
        return replace(EXTENDED, hybrid_sharding=self.cluster.has_uneven_links)

    def problem(self) -> Problem:
        """The search problem this request is."""
        return Problem(
            cost=CostModel(model=self.model, cluster=self.cluster, conventions=self.conventions, profile=self.profile),
            space=space_named(self.space, self.effective_switches),
            schedule=self.schedule,
            budget=self.cluster.tensor_bytes(self.budget_bytes),
            batches=self.batches,
            max_micro_batches=self.max_micro_batches,
            cuts=self.cuts,
        )


def default_batch_step(devices: int) -> int:
    """Eight, as in the paper; on large clusters one sample a device."""
    return devices if devices > 16 else 8


def try_plan(request: Request) -> Plan | None:
    """The best plan, or None when nothing fits; :mod:`galvatron.planner.plan.advice` says what would."""
    optimum = search(request.problem())
    return None if optimum is None else _written_out(request, optimum)


def _written_out(request: Request, optimum: Optimum) -> Plan:
    stages = []
    size = request.cluster.devices // optimum.pipeline_degree
    for p in range(optimum.pipeline_degree):
        begin, end = optimum.solved.positions[p : p + 2]
        names = [layer.name for layer in request.model.layers[begin:end]]
        memory = _memory_use(request, optimum, p)
        stages.append(
            PlannedStage(
                devices=tuple(range(p * size, (p + 1) * size)),
                layers=tuple(
                    PlannedLayer(index=begin + i, layer=name, strategy=str(strategy))
                    for i, (name, strategy) in enumerate(zip(names, optimum.strategies[p], strict=True))
                ),
                time_s=optimum.solved.stages[p].time / 1e9,
                time=_time_use(optimum, p),
                in_flight=optimum.combination.in_flight[p],
                memory_bytes=sum(asdict(memory).values()),
                memory=memory,
            )
        )
    iteration_s = optimum.solved.iteration_ns / 1e9
    throughput = optimum.batch / optimum.solved.iteration_ns
    lower_bound_s = iteration_s * min(1.0, throughput / max(throughput, optimum.proof.rest_bound))
    slowest_ns = max(stage.time for stage in optimum.solved.stages)
    switches, proof = request.effective_switches, optimum.proof
    return Plan(
        version=FORMAT_VERSION,
        model=ModelFacts.of(request.model),
        cluster=ClusterFacts(digest=request.cluster.digest, devices=request.cluster.devices, facts=request.cluster),
        profile=request.profile,
        space=SpaceFacts(
            name=request.space,
            **asdict(switches),
            cuts=request.cuts.value,
            conventions=request.conventions.name,
            batches=request.batches,
            max_micro_batches=request.max_micro_batches,
        ),
        memory_budget_bytes=request.budget_bytes,
        schedule=request.schedule.name,
        batch=optimum.batch,
        micro_batches=optimum.micro_batches,
        throughput=optimum.batch / iteration_s,
        iteration_s=iteration_s,
        bubble_s=max(0, optimum.solved.iteration_ns - optimum.micro_batches * slowest_ns) / 1e9,
        stages=tuple(stages),
        certificate=Certificate(
            lower_bound_s=lower_bound_s,
            gap=iteration_s / lower_bound_s - 1,
            combinations=proof.combinations,
            opened=proof.opened,
            solved=proof.solved,
            stages_solved=proof.stages_solved,
        ),
    )


def _memory_use(request: Request, optimum: Optimum, stage: int) -> MemoryUse:
    combination = optimum.combination
    begin, end = optimum.solved.positions[stage : stage + 2]
    rows, columns = combination.layers.kinds[begin:end], np.array(optimum.solved.stages[stage].choice)
    tables = combination.tables
    borrowed = combination.costs.resplit_in(rows, columns, combination.micro_batch, first=begin == 0)
    activations = tables.activation_bytes[rows, columns] + borrowed.activation_bytes
    return MemoryUse(
        states=int(tables.state_bytes[rows, columns].sum()),
        activations=int(activations.sum()) * combination.in_flight[stage],
        transient=int((tables.transient_bytes[rows, columns] + borrowed.transient_bytes).max()),
        reserved=request.cluster.reserved_bytes,
    )


def _time_use(optimum: Optimum, stage: int) -> TimeUse:
    combination = optimum.combination
    begin, end = optimum.solved.positions[stage : stage + 2]
    rows, columns = combination.layers.kinds[begin:end], np.array(optimum.solved.stages[stage].choice)
    costs = combination.costs.layer_costs(np.array(combination.micro_batch))
    borrowed = combination.costs.resplit_in(rows, columns, combination.micro_batch, first=begin == 0)
    layouts = combination.costs.layout_of[columns]
    transfer = 0
    if begin > 0:
        transfer += int(combination.transfer[combination.layers.kinds[begin - 1], layouts[0]])
    if end < combination.layers.count:
        transfer += int(combination.transfer[rows[-1], layouts[-1]])

    def total(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
        full = np.broadcast_to(table, combination.tables.time_ns.shape)
        return float(full[rows, columns].sum())

    return TimeUse(
        compute_s=total(costs.compute_s),
        tp_s=total(costs.tp_s) + float(borrowed.time_ns.sum()) / 1e9,
        sdp_s=total(costs.sdp_s),
        layout_s=float(combination.change[rows[:-1], layouts[:-1], layouts[1:]].sum()) / 1e9,
        transfer_s=transfer / 1e9,
        sync_s=total(costs.sync_s),
        optimizer_s=total(costs.optimizer_s),
    )
