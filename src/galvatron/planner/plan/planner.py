"""From a request to a plan: the search decides, and what is decided (by it or by hand) is priced and written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, pairwise

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B, Cluster, ModelProfile, ModelSpec, Schedule, Strategy
from galvatron.core.spec.figures import MOST_SAMPLES
from galvatron.core.spec.limits import Limits
from galvatron.core.units import format_bytes
from galvatron.planner.cost import (
    GALVATRON,
    NEVER,
    Conventions,
    CostModel,
    Floats,
    Integers,
    Pace,
    iteration_ns,
)
from galvatron.planner.plan.limiting import limited_space, pinned
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.reasons import why_not
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
from galvatron.planner.search import CutRule, Optimum, Problem, Tell, Watch, search
from galvatron.planner.space import Space, Switches, default_switches, space_named

__all__ = ["Decisions", "Request", "default_batch_step", "try_plan", "written_out"]

_SAMPLES_PER_DEVICE = 64
"""Largest batch searched, for each device: beyond it throughput hardly grows."""
_TOKENS_PER_DEVICE = 1 << 17
_TOKENS = 1 << 22
"""Most tokens of a batch searched by default, for each device and in all: language models are trained with a few
million tokens a step at most (Llama 2: 4M), and with less on few devices, where a step would take a minute."""
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
    any_tokens: bool = False
    """Whether batches are searched however many tokens they have."""
    space: str = "full"
    switches: Switches | None = None
    """Extensions; None: all of them, hybrid sharding only where islands differ in speed."""
    schedule: Schedule = ONE_F_ONE_B
    cuts: CutRule = CutRule.EXACT
    conventions: Conventions = GALVATRON
    profile: ModelProfile | None = None
    max_micro_batches: int | None = None
    stages_a_micro_batch: int | None = None
    """Whether deep pipelines may have more micro-batches than that: one for so many stages; None: they may not."""
    time_limit_s: float | None = None
    """After which the best plan so far must do; None: until it is proven."""
    limits: Limits | None = None
    """What else is ruled out of the space; None: nothing."""

    def __post_init__(self) -> None:
        for name in ("batch", "batch_step", "max_batch", "max_micro_batches"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InvalidInput(f"{name.replace('_', '-')}: {value!r} given; expected a whole number")
            if value is not None and value < 1:
                raise InvalidInput(f"{name.replace('_', '-')}: {value} given; it must be at least 1")
        for name in ("batch", "max_batch", "batch_step"):
            value = getattr(self, name)
            if value is not None and value > MOST_SAMPLES:
                raise InvalidInput(
                    f"{name.replace('_', '-')}: {value} given; at most {MOST_SAMPLES} samples are planned"
                )
        if not self.batches:
            step = self.batch_step or default_batch_step(self.cluster.devices)
            raise InvalidInput(
                f"max-batch: {self.max_batch} given, but batches are searched in steps of {step}, so there is none; "
                "give a smaller batch-step or a larger max-batch"
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
                f"memory: {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes) given, but a "
                f"{self.cluster.device.name} has only {format_bytes(self.cluster.device.memory_bytes)} "
                f"({self.cluster.device.memory_bytes}); give at most that"
            )
        if self.time_limit_s is not None and not 0 < self.time_limit_s < math.inf:
            raise InvalidInput(f"time-limit: {self.time_limit_s:g} given; expected seconds, more than 0")
        if self.budget_bytes <= 0:
            raise InvalidInput("memory: the budget must be positive")
        _ = self.pins  # refused here, and not in the search
        if self.limits and self.limits.max_micro_batch is not None and self.limits.max_micro_batch < 1:
            raise InvalidInput(f"max-micro-batch: {self.limits.max_micro_batch} given; it must be at least 1")

    @property
    def budget_bytes(self) -> int:
        return self.cluster.device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def batches(self) -> tuple[int, ...]:
        if self.batch is not None:
            return (self.batch,)
        devices = self.cluster.devices
        limit = self.max_batch or self._usual_batch
        step = self.batch_step or default_batch_step(devices)
        if self.batch_step is self.max_batch is None and limit < 8 * step:
            step = max(1, 1 << (limit // 8).bit_length() - 1) if limit >= 8 else 1
        limit = limit if self.max_batch else max(limit, step)
        return tuple(range(step, min(limit, step * (_MOST_BATCHES + 1)) + 1, step))

    @property
    def _usual_batch(self) -> int:
        """The largest batch that is searched where nobody says."""
        devices, length = self.cluster.devices, self.model.training.sequence_length
        most = _SAMPLES_PER_DEVICE * devices
        if self.any_tokens or length is None:
            return most
        return min(most, max(devices, min(_TOKENS, _TOKENS_PER_DEVICE * devices) // length))

    @property
    def effective_switches(self) -> Switches:
        """The extensions searched; a model without experts has no use for expert parallelism, one whose sequences
        cannot be divided none for context parallelism, and a cluster that says nothing of the host none for offload."""
        length = self.model.training.sequence_length
        switches = default_switches(self.cluster, length) if self.switches is None else self.switches
        if not self.model.divisible or not switches.context_parallel:
            switches = replace(switches, context_parallel=False, zero3=False, context_orders=False)
        switches = switches if self.cluster.device.offloads else replace(switches, offload=False)
        return switches if self.model.has_experts else replace(switches, expert_parallel=False)

    @property
    def searched_space(self) -> Space:
        """The space of the request's name, with its extensions and within its limits."""
        return limited_space(space_named(self.space, self.effective_switches), self.limits, self.cluster)

    @property
    def pins(self) -> tuple[tuple[str, Strategy], ...]:
        """Kinds of layers that keep one strategy; raises :class:`InvalidInput` for what no plan could do."""
        return pinned(self.limits, self.model, self.searched_space, self.cluster.devices)

    def problem(self) -> Problem:
        """The search problem this request is."""
        return Problem(
            cost=CostModel(
                model=self.model,
                cluster=self.cluster,
                conventions=self.conventions,
                profile=self.profile,
                schedule=self.schedule,
                pins=self.pins,
            ),
            space=self.searched_space,
            max_micro_batch=self.limits.max_micro_batch if self.limits else None,
            budget=self.cluster.tensor_bytes(self.budget_bytes),
            batches=self.batches,
            max_micro_batches=self.max_micro_batches,
            stages_a_micro_batch=self.stages_a_micro_batch,
            cuts=self.cuts,
        )


def default_batch_step(devices: int) -> int:
    """Eight, as in the paper; on large clusters one sample a device."""
    return devices if devices > 16 else 8


def try_plan(request: Request, tell: Tell | None = None) -> Plan | None:
    """The best plan, or None when nothing fits; :mod:`galvatron.planner.plan.advice` says what would.

    ``tell`` hears of a search that takes more than a second.
    """
    optimum = search(replace(request.problem(), watch=Watch(request.time_limit_s, tell)))
    if optimum is None:
        return None
    decisions = Decisions(batch=optimum.batch, micro_batches=optimum.micro_batches, stages=optimum.strategies)
    return written_out(request, decisions, _certificate(optimum))


def _certificate(optimum: Optimum) -> Certificate:
    proof = optimum.proof
    iteration_s = optimum.solved.iteration_ns / 1e9
    throughput = optimum.batch / optimum.solved.iteration_ns
    lower_bound_s = iteration_s * min(1.0, throughput / max(throughput, proof.rest_bound))
    return Certificate(
        lower_bound_s=lower_bound_s,
        gap=iteration_s / lower_bound_s - 1,
        combinations=proof.combinations,
        opened=proof.opened,
        solved=proof.solved,
        stages_solved=proof.stages_solved,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """All that a plan decides, by a search or by hand; what it costs follows from the request."""

    batch: int
    micro_batches: int
    stages: tuple[tuple[Strategy, ...], ...]
    """Strategy of each layer, by stage, and thereby where stages begin."""

    @property
    def micro_batch(self) -> int:
        return self.batch // self.micro_batches


def written_out(request: Request, decisions: Decisions, certificate: Certificate | None) -> Plan:
    """The plan that decides so, priced on the request's cluster and written out in full."""
    pricing = _Pricing(request, decisions)
    spans = pairwise([0, *accumulate(map(len, decisions.stages))])
    stages = [pricing.stage(number, span) for number, span in enumerate(spans)]
    times_ns = [time_ns for _, time_ns in stages]
    pace = Pace.of(request.schedule, len(stages), decisions.micro_batches, request.cluster.compute_contention)
    total_ns = iteration_ns(times_ns, pace)
    iteration_s = total_ns / 1e9
    # Where sequences stay whole, plans say nothing of how they could be divided, as before they could.
    switches = request.effective_switches
    used = [strategy for stage in decisions.stages for strategy in stage]
    switches = replace(  # by hand, maybe
        switches,
        context_parallel=switches.context_parallel or any(own.context_degree > 1 for own in used),
        zero3=switches.zero3 or any(own.zero3 for own in used),
    )
    return Plan(
        version=FORMAT_VERSION,
        model=ModelFacts.of(request.model if switches.context_parallel else request.model.undivided),
        cluster=ClusterFacts(digest=request.cluster.digest, devices=request.cluster.devices, facts=request.cluster),
        profile=request.profile,
        space=SpaceFacts(
            name=request.space,
            **asdict(switches),
            cuts=request.cuts.value,
            conventions=request.conventions.name,
            batches=request.batches,
            max_micro_batches=request.max_micro_batches,
            stages_a_micro_batch=request.stages_a_micro_batch,
            limits=request.limits or None,
        ),
        memory_budget_bytes=request.budget_bytes,
        schedule=request.schedule.name,
        batch=decisions.batch,
        micro_batches=decisions.micro_batches,
        throughput=decisions.batch / iteration_s,
        iteration_s=iteration_s,
        bubble_s=max(0, total_ns - decisions.micro_batches * max(times_ns)) / 1e9,
        stages=tuple(stage for stage, _ in stages),
        certificate=certificate,
    )


class _Pricing:
    """What decisions cost, stage by stage: the cost model's tables for just the strategies that they use."""

    def __init__(self, request: Request, decisions: Decisions) -> None:
        self.request, self.decisions = request, decisions
        names = [kind.name for kind in request.model.kinds]
        self.kinds = np.array([names.index(layer.name) for layer in request.model.layers])
        used = tuple(dict.fromkeys(chain.from_iterable(decisions.stages)))
        self.costs = request.problem().cost.stage(used, len(decisions.stages))
        self.column_of = {strategy: column for column, strategy in enumerate(used)}
        micro_batch, micro_batches = np.array(decisions.micro_batch), np.array(decisions.micro_batches)
        self.tables = self.costs.tables(micro_batch, micro_batches)
        self.parts = self.costs.layer_costs(micro_batch)
        self.change_ns = self.costs.change_ns(decisions.micro_batch)
        self.transfer_ns = self.costs.transfer_ns(decisions.micro_batch)
        self.gradient_ns = self.costs.gradient_transfer_ns(decisions.micro_batch)

    def stage(self, number: int, span: tuple[int, int]) -> tuple[PlannedStage, int]:
        """The stage of these layers, and its mean time of a micro-batch in nanoseconds."""
        begin, end = span
        chosen = self.decisions.stages[number]
        self._check(begin, chosen)
        rows, columns = self.kinds[begin:end], np.array([self.column_of[strategy] for strategy in chosen])
        resplit = self.costs.resplit_in(rows, columns, self.decisions.micro_batch, first=begin == 0)
        change_ns, transfer_ns = self._moving_ns(span, columns)
        borrowed_ns = int(resplit.time_ns.sum())
        time_ns = int(self.tables.time_ns[rows, columns].sum()) + borrowed_ns + change_ns + transfer_ns
        degree, request = len(self.decisions.stages), self.request
        flying = request.schedule.in_flight(number, degree, self.decisions.micro_batches)
        activations = self.tables.activation_bytes[rows, columns] + resplit.activation_bytes
        memory = MemoryUse(
            states=int(self.tables.state_bytes[rows, columns].sum()),
            activations=int(activations.sum()) * flying,
            transient=int((self.tables.transient_bytes[rows, columns] + resplit.transient_bytes).max()),
            reserved=request.cluster.reserved_bytes,
        )

        def total(table: Floats) -> float:
            return float(np.broadcast_to(table, self.tables.time_ns.shape)[rows, columns].sum())

        size = request.cluster.devices // degree
        stage = PlannedStage(
            devices=tuple(range(number * size, (number + 1) * size)),
            layers=tuple(
                PlannedLayer(index=index, layer=request.model.layers[index].name, strategy=str(strategy))
                for index, strategy in enumerate(chosen, start=begin)
            ),
            time_s=time_ns / 1e9,
            time=TimeUse(
                compute_s=total(self.parts.compute_s),
                tp_s=total(self.parts.tp_s) + borrowed_ns / 1e9,
                sdp_s=total(self.parts.sdp_s),
                layout_s=change_ns / 1e9,
                transfer_s=transfer_ns / 1e9,
                sync_s=total(self.parts.sync_s),
                optimizer_s=total(self.parts.optimizer_s),
                ep_s=total(self.parts.ep_s),
                cp_s=total(self.parts.cp_s),
            ),
            in_flight=flying,
            memory_bytes=sum(asdict(memory).values()),
            memory=memory,
        )
        return stage, time_ns

    def _moving_ns(self, span: tuple[int, int], columns: Integers) -> tuple[int, int]:
        """Of activations: between the layers of a stage, and from the stages beside it."""
        begin, end = span
        rows, layouts = self.kinds[begin:end], self.costs.layout_of[columns]
        change = int(self.change_ns[rows[:-1], layouts[:-1], layouts[1:]].sum())
        entering = int(self.transfer_ns[self.kinds[begin - 1], layouts[0]]) if begin > 0 else 0
        leaving = int(self.gradient_ns[rows[-1], layouts[-1]]) if end < len(self.kinds) else 0
        return change, entering + leaving

    def _check(self, begin: int, chosen: Sequence[Strategy]) -> None:
        """No search decides for what cannot be run; a hand may."""
        for index, strategy in enumerate(chosen, start=begin):
            if self.tables.time_ns[self.kinds[index], self.column_of[strategy]] < NEVER:
                continue
            kind = self.request.model.layers[index]
            reason = why_not(self.request.model, kind, strategy)
            if strategy.offload and not self.request.cluster.device.offloads:
                reason = "the cluster does not say what device.host_bandwidth and device.host_memory are"
            elif reason is None and self.decisions.micro_batch % strategy.data_degree:
                reason = f"their samples do not divide over {strategy.data_degree} ranks"
            elif reason is None:
                reason = "the host has no room for all that it would offload"
            raise InvalidInput(
                f"layer {index} ({kind.name}): strategy {str(strategy)!r} cannot run it in "
                f"micro-batches of {self.decisions.micro_batch}: {reason}"
            )
