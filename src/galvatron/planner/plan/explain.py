"""Why this plan and not another: the best of every space beside it, what holds those back, what more memory buys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import schedule_named
from galvatron.core.units import GIB, format_bytes, format_seconds
from galvatron.planner.cost import CONVENTIONS, NEVER
from galvatron.planner.plan.advice import impossibility, smallest_budget
from galvatron.planner.plan.lengths import MoreDevices, longest_sequence, more_devices
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.search import Candidates, CutRule
from galvatron.planner.space import SPACES

__all__ = ["Explanation", "Rival", "explain", "reasons", "request_of", "rivals", "time_shares"]


@dataclass(frozen=True, slots=True)
class Rival:
    """The best plan of a restricted space, or what it would take to have one."""

    space: str
    plan: Plan | None
    obstacle: str
    """Its bottleneck, in a sentence."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan beside its rivals."""

    plan: Plan
    rivals: tuple[Rival, ...]
    reasons: tuple[str, ...]
    """Why each layer has its strategy, in the order of the model."""
    one_more_gib: Plan
    """The best plan with one GiB more on each device, even where no such device is sold."""
    longest: int | None = None
    """Tokens of the longest sample that fits; only where sequences may be divided, and None where nobody knows."""
    larger: tuple[MoreDevices, ...] = ()
    """What more devices would buy; only where sequences may be divided."""


def explain(plan: Plan) -> Explanation:
    """What a plan does and why, every other space beside it."""
    request = request_of(plan)
    more = request.budget_bytes + GIB
    device = replace(request.cluster.device, memory_bytes=max(more, request.cluster.device.memory_bytes))
    roomier = try_plan(replace(request, cluster=replace(request.cluster, device=device), memory_bytes=more))
    whole = Explanation(plan, rivals(request), reasons(plan, request), roomier or plan)
    if not plan.space.context_parallel:
        return whole
    return replace(whole, longest=longest_sequence(request), larger=more_devices(request))


def reasons(plan: Plan, request: Request) -> tuple[str, ...]:
    """For each layer: the strategy that would be fastest by itself, what it would gain, and what it would cost."""
    problem = request.problem()
    model = request.model
    candidates = Candidates.of(problem.cost, problem.space, plan.pipeline_degree)
    priced = candidates.tables(np.array([plan.micro_batch]), np.array([plan.micro_batches]))
    columns = candidates.columns(priced, [stage.in_flight for stage in plan.stages])
    searched = [candidates.strategy(columns, index) for index in range(len(columns.strategy))]
    used = [strategy for stage in plan.stages for strategy in stage.strategies]  # by hand, maybe
    strategies = tuple(dict.fromkeys([*searched, *used]))
    costs = problem.cost.stage(strategies, plan.pipeline_degree)
    tables = costs.tables(np.array(plan.micro_batch), np.array(plan.micro_batches))
    names = [str(strategy) for strategy in strategies]
    rows = {kind.name: row for row, kind in enumerate(model.kinds)}
    pinned = {pin.layer for pin in (request.limits.pins if request.limits else ())}
    said = []
    for stage in plan.stages:
        memory = tables.state_bytes + stage.in_flight * tables.activation_bytes
        for layer in stage.layers:
            row, chosen = rows[layer.layer], names.index(layer.strategy)
            time = np.where(tables.time_ns[row] < NEVER, tables.time_ns[row], 2 * NEVER)
            fastest = int(time.argmin())
            gain_s = float(time[chosen] - time[fastest]) * plan.micro_batches / 1e9
            extra = int(memory[row, fastest] - memory[row, chosen])
            saves = f"would save {format_seconds(gain_s)} an iteration"
            if layer.layer in pinned:
                said.append("pinned")
            elif gain_s <= 0:
                said.append("the fastest for this layer")
            elif extra > 0:
                said.append(f"{names[fastest]} {saves}, but needs {format_bytes(extra)} more")
            else:
                where = "changes of layout, tied weights or at the peak"
                said.append(f"{names[fastest]} alone {saves}, but costs more in {where}")
    return tuple(said)


def request_of(plan: Plan) -> Request:
    """The request a plan answers, from the facts it carries."""
    space = plan.space
    conventions = next(each for each in CONVENTIONS if each.name == space.conventions)
    fixed = len(space.batches) == 1
    return Request(
        model=plan.model.spec(),
        cluster=plan.cluster.facts,
        memory_bytes=plan.memory_budget_bytes,
        batch=space.batches[0] if fixed else None,
        batch_step=None if fixed else space.batches[0],
        max_batch=None if fixed else space.batches[-1],
        space=space.name,
        switches=space.switches,
        schedule=schedule_named(plan.schedule),
        cuts=CutRule(space.cuts),
        conventions=conventions,
        profile=plan.profile,
        max_micro_batches=space.max_micro_batches,
        stages_a_micro_batch=space.stages_a_micro_batch,
        limits=space.limits,
    )


def rivals(request: Request) -> tuple[Rival, ...]:
    """The best plan of every space for the same request; spaces that the device count rules out say so."""
    found = []
    for space in SPACES:
        try:
            asked = replace(request, space=space.name)
            plan = try_plan(asked)
        except InvalidInput as error:
            found.append(Rival(space.name, None, str(error)))
            continue
        found.append(Rival(space.name, plan, _obstacle(asked, plan)))
    switches = request.effective_switches
    if switches.context_parallel:
        asked = replace(request, switches=replace(switches, context_parallel=False, zero3=False))
        plan = try_plan(asked)
        found.append(Rival(f"{request.space} without CP", plan, _obstacle(asked, plan)))
    return tuple(found)


def _obstacle(request: Request, plan: Plan | None) -> str:
    if plan is None:
        least = smallest_budget(request)
        if least is None:
            return f"not possible: {impossibility(request)}"
        return f"does not fit: needs {format_bytes(least[0])} at batch {least[1]}"
    name, share = max(time_shares(plan).items(), key=lambda item: item[1] if item[0] != "compute" else -1.0)
    fullest = plan.memory_bytes / plan.memory_budget_bytes
    return f"{share:.0%} of the time goes to {name}; memory {fullest:.0%} full"


def time_shares(plan: Plan) -> dict[str, float]:
    """How the slowest stage spends an iteration, as shares that sum to one."""
    slowest = max(plan.stages, key=lambda stage: stage.time_s)
    m, use = plan.micro_batches, slowest.time
    seconds = {
        "compute": m * use.compute_s,
        "tensor-parallel communication": m * use.tp_s,
        "tokens on their way to experts": m * use.ep_s,
        "exchanges of divided sequences": m * use.cp_s,
        "gathering and scattering shards": m * use.sdp_s,
        "layout changes": m * use.layout_s,
        "transfers between stages": m * use.transfer_s,
        "gradient synchronisation": use.sync_s,
        "the optimizer": use.optimizer_s,
        "pipeline bubbles": plan.bubble_s,
    }
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}
