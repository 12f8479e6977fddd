"""The best plan that a system can express: every uniform layout that it has options for, each searched exactly.

Of a layout only the cuts of the pipeline and the number of micro-batches are left to the search. The best of all
layouts is therefore the best that the system can run, under our cost model and at the batch asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from galvatron.core.errors import Infeasible
from galvatron.core.spec import Axis, ModelSpec, Strategy
from galvatron.planner.cost import DISTRIBUTED_OPTIMIZER, GALVATRON, Conventions
from galvatron.planner.exchange.target import Target, refusal
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform, check_shape, stages_of
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Decisions, Request, written_out
from galvatron.planner.search import search
from galvatron.planner.space import EXPERT_RULES, Space, divisors

__all__ = ["Found", "best_for", "conventions_of", "needed_bytes"]


@dataclass(frozen=True, slots=True)
class Found:
    """A layout, priced."""

    layout: Uniform
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class _OneLayout(Space):
    """The strategies of one layout."""

    only: tuple[Strategy, ...]

    def pipeline_degrees(self, devices: int) -> tuple[int, ...]:
        return () if self.degree is None else (self.degree,)

    def strategies(self, devices: int, *, experts: bool = False) -> tuple[Strategy, ...]:
        return self.only


def conventions_of(layout: Uniform) -> Conventions:
    """By which a layout is priced."""
    return DISTRIBUTED_OPTIMIZER if layout.sharding is Sharding.OPTIMIZER else GALVATRON


def needed_bytes(plan: Plan) -> int:
    """The least budget in which a plan fits, with what is left to the allocator."""
    cluster = plan.cluster.facts
    return cluster.least_budget(plan.memory_bytes - cluster.reserved_bytes)


def best_for(request: Request, target: Target) -> Found:
    """The fastest plan that a system can run for the request's batch, or :class:`Infeasible`."""
    check_shape(request.model)
    found: Found | None = None
    for layout in _layouts(request, target):
        each = _searched(request, layout)
        if each is not None and target.partial:
            each = _less_recompute(request, each)
        if each is not None and (found is None or each.plan.throughput > found.plan.throughput):
            found = each
    if found is None:
        within = f" within {request.limits}" if request.limits else ""
        raise Infeasible(
            f"no plan{within} that {target.title} can run fits {request.model.name} with batch {request.batch} on "
            f"{request.cluster.devices} × {request.cluster.device.name}; allow more memory or another batch"
        )
    return found


def _layouts(request: Request, target: Target) -> Iterator[Uniform]:
    """Every layout that the system has, and that the request's space, limits and model allow."""
    model, space, devices = request.model, request.searched_space, request.cluster.devices
    loss = (False, True) if model.layers[-1].fused_loss is not None else (False,)
    for pipeline in space.pipeline_degrees(devices):
        if pipeline > len(model.layers):
            continue
        plain = frozenset(space.strategies(devices // pipeline))
        axes = frozenset(space.expert_axes(devices // pipeline) if model.has_experts else ())
        for degrees, grade, fused in product(_degrees(devices // pipeline, model), Recompute, loss):
            layout = replace(
                degrees,
                batch=request.batch or 1,
                pipeline=pipeline,
                schedule=request.schedule.name,
                recompute=grade,
                fused_loss=fused,
            )
            own = {layout.of_kind(kind, model) for kind in model.kinds}
            in_space = all(replace(each, experts=()) in plain and _allows_experts(each, axes) for each in own)
            if not in_space or refusal(target, layout, model) is not None:
                continue
            if all(model.allows(kind, layout.of_kind(kind, model)) for kind in model.kinds):
                yield layout


def _allows_experts(strategy: Strategy, axes: frozenset[tuple[Axis, ...]]) -> bool:
    if not strategy.experts:
        return True
    return strategy.experts in axes and not any(rule.forbids and rule.forbids(strategy) for rule in EXPERT_RULES)


def _degrees(devices: int, model: ModelSpec) -> Iterator[Uniform]:
    """Ways to divide the devices of a stage."""
    for tensor in divisors(devices):
        data = devices // tensor
        sharded = [(data // shards, shards, Sharding.PARAMETERS) for shards in divisors(data)[1:]]
        whole = [(1, data, Sharding.OPTIMIZER), (1, data, Sharding.GRADIENTS)] if data > 1 else []
        for replicas, shards, sharding in [(data, 1, Sharding.NONE), *whole, *sharded]:
            for sequence_parallel in (False, True) if tensor > 1 else (False,):
                base = Uniform(
                    batch=1,
                    micro_batches=1,
                    replicas=replicas,
                    shards=shards,
                    sharding=sharding,
                    tensor=tensor,
                    sequence_parallel=sequence_parallel,
                )
                yield base
                yield from _with_experts(base, model)


def _with_experts(base: Uniform, model: ModelSpec) -> Iterator[Uniform]:
    if not model.has_experts:
        return
    inside = (1,) if base.sequence_parallel or base.tensor == 1 else (1, base.tensor)
    for expert, tensor in product(divisors(base.devices)[1:], inside):
        layout = replace(base, expert=expert, expert_tensor=tensor)
        if layout.divides:
            yield layout


def _searched(request: Request, layout: Uniform) -> Found | None:
    """The layout with the best cuts and micro-batches; None: it does not fit."""
    asked = replace(request, conventions=conventions_of(layout))
    pins = {kind.name: layout.of_kind(kind, request.model) for kind in request.model.kinds}
    named = {pin.layer: Strategy.parse(pin.strategy) for pin in request.limits.pins} if request.limits else {}
    if any(pins[name] != strategy for name, strategy in named.items()):
        return None
    problem = asked.problem()
    only = tuple(dict.fromkeys(pins.values()))
    space = _OneLayout(
        name=request.space,
        title="one layout",
        switches=request.effective_switches,  # among them accumulation
        degree=layout.pipeline,
        only=only,
    )
    optimum = search(replace(problem, cost=replace(problem.cost, pins=tuple(pins.items())), space=space))
    if optimum is None:
        return None
    decisions = Decisions(batch=optimum.batch, micro_batches=optimum.micro_batches, stages=optimum.strategies)
    plan = written_out(asked, decisions, None)
    blocks = [len(stage) for stage in optimum.strategies]
    blocks[0] -= 1
    blocks[-1] -= 1
    done = replace(layout, micro_batches=optimum.micro_batches, blocks=tuple(blocks))
    return Found(done, plan)


def _less_recompute(request: Request, found: Found) -> Found:
    """With as few recomputed blocks in each stage as fit."""
    if found.layout.recompute is not Recompute.FULL:
        return found
    asked = replace(request, conventions=conventions_of(found.layout))
    too_few, enough, best = -1, max(found.layout.blocks), found
    while enough - too_few > 1:
        count = (too_few + enough) // 2
        layout = replace(found.layout, recomputed=count)
        plan = priced(asked, stages_of(layout, request.model), micro_batches=layout.micro_batches)
        if needed_bytes(plan) <= request.budget_bytes:
            enough, best = count, Found(layout, plan)
        else:
            too_few = count
    if best.layout.recomputed == 0:
        return Found(replace(best.layout, recompute=Recompute.NONE, recomputed=None), best.plan)
    return best
