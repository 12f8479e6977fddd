"""Why this plan and not another: every space's best beside it, what stops the others, what more memory would buy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron.cost import GALVATRON, PAPER_SYSTEMS, Schedule
from galvatron.errors import InvalidInput
from galvatron.plans.advice import smallest_budget
from galvatron.plans.plan import Plan
from galvatron.plans.planner import Request, try_plan
from galvatron.search import CutRule
from galvatron.space import SPACES, Switches
from galvatron.units import GIB, format_bytes

__all__ = ["Explanation", "Rival", "explain", "request_of", "rivals", "time_shares"]


@dataclass(frozen=True, slots=True)
class Rival:
    """The best plan of a restricted space, or what it would take to have one."""

    space: str
    plan: Plan | None
    obstacle: str
    """What stops it from being as good, in a sentence."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan beside its rivals."""

    plan: Plan
    rivals: tuple[Rival, ...]
    one_more_gib: Plan | None
    """The best plan with one GiB more on each device; None where the device has no more."""


def explain(plan: Plan) -> Explanation:
    request = request_of(plan)
    more = request.budget_bytes + GIB
    roomier = None
    if more <= request.cluster.device.memory_bytes:
        roomier = try_plan(replace(request, memory_bytes=more))
    return Explanation(plan, rivals(request), roomier)


def request_of(plan: Plan) -> Request:
    """The request a plan answers, from the facts it carries."""
    space = plan.space
    conventions = next((each for each in (GALVATRON, PAPER_SYSTEMS) if each.name == space.conventions), None)
    if conventions is None:
        raise InvalidInput(f"space.conventions: {space.conventions!r} is unknown")
    fixed = len(space.batches) == 1
    return Request(
        model=plan.model.spec(),
        cluster=plan.cluster.facts,
        memory_bytes=plan.memory_budget_bytes,
        batch=space.batches[0] if fixed else None,
        batch_step=None if fixed else space.batches[0],
        max_batch=None if fixed else space.batches[-1],
        space=space.name,
        switches=Switches(
            recompute=space.recompute,
            sequence_parallel=space.sequence_parallel,
            zero2=space.zero2,
            hybrid_sharding=space.hybrid_sharding,
            accumulation=space.accumulation,
        ),
        schedule=Schedule(plan.schedule),
        cuts=CutRule(space.cuts),
        conventions=conventions,
        profile=plan.profile,
        max_micro_batches=space.max_micro_batches,
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
    return tuple(found)


def _obstacle(request: Request, plan: Plan | None) -> str:
    if plan is None:
        least = smallest_budget(request)
        if least is None:
            return "no batch searched can be divided that way"
        return f"does not fit: needs {format_bytes(least)} at batch {request.batches[0]}"
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
        "gathering and scattering shards": m * use.sdp_s,
        "layout changes": m * use.layout_s,
        "transfers between stages": m * use.transfer_s,
        "gradient synchronisation": use.sync_s,
        "the optimizer": use.optimizer_s,
        "pipeline bubbles": plan.bubble_s,
    }
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}
