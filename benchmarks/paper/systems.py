"""The systems of the table and the plan that each would run in a cell: its best by the planner, with measured profiles.

A stock program has no plan, but is one: pure DP is every layer under DP. So the planner, held to the space of a system,
finds the batch of each, and for the pipeline also micro-batches and cuts. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cells import BATCH_STEP
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import GPIPE, ONE_F_ONE_B, Cluster
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.plan.profiled import as_profiled
from galvatron.planner.plan.record import layer_runs
from galvatron.planner.space import PAPER
from workloads import Workload

__all__ = ["SYSTEMS", "Choice", "Setting", "System", "choose", "described", "system_named", "without_slowdown"]

_MOST_MEMORY = 2**43
_MORE_MEMORY = 1.1
"""Factor by which the budget of a plan that does not fit grows until there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One row of the table."""

    name: str
    space: str
    stock: frozenset[str] = frozenset()
    """Families for which PyTorch's own program runs it; our runtime runs the others."""
    extended: bool = False
    """Everything the planner has, where the others keep to the paper: GPipe, no recompute."""

    def program(self, family: str) -> str:
        return "stock" if family in self.stock else "galvatron"


_ALL = frozenset({"bert", "vit", "t5", "swin"})
_ENCODERS = frozenset({"bert", "vit"})
SYSTEMS = (
    System(name="dp", space="dp", stock=_ALL),
    System(name="sdp", space="sdp", stock=_ALL),
    System(name="galvatron", space="full"),
    System(name="tp", space="tp", stock=_ENCODERS),
    System(name="pp", space="pp", stock=_ENCODERS),
    System(name="dp+tp", space="dp+tp"),
    System(name="dp+pp", space="dp+pp"),
    System(name="3d", space="3d"),
    System(name="galvatron-extended", space="full", extended=True),
)
"""In the order in which cells are run: what matters most first."""


def system_named(name: str) -> System:
    for system in SYSTEMS:
        if system.name == name:
            return system
    raise InvalidInput(f"systems: {name!r} given; expected some of {', '.join(system.name for system in SYSTEMS)}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A column of the table: what is trained, where, in how much memory."""

    workload: Workload
    cluster: Cluster
    budget_bytes: int
    max_batch: int

    @property
    def _cluster(self) -> Cluster:
        return as_profiled(self.cluster, self.workload.profile)

    def request(self, system: System, *, batch: int | None = None, max_batch: int | None = None) -> Request:
        """``batch``: exactly this one; else all up to ``max_batch``, or the setting's own. A stock program gets all of
        its memory: nothing is set aside for what an allocator loses. Where that is too much, a smaller batch is next.
        """
        stock = system.program(self.workload.family) == "stock"
        return Request(
            model=self.workload.model,
            cluster=replace(self.cluster, fragmentation=0.0) if stock else self._cluster,
            memory_bytes=self.budget_bytes,
            batch=batch,
            batch_step=None if batch else BATCH_STEP,
            max_batch=None if batch else max_batch or self.max_batch,
            space=system.space,
            switches=None if system.extended else PAPER,
            schedule=ONE_F_ONE_B if system.extended else GPIPE,
            profile=self.workload.profile,
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan to run."""

    plan: Plan
    fits: bool
    """Whether the planner says that it fits the budget."""


def choose(setting: Setting, system: System, batch: int | None = None) -> Choice:
    """The system's best plan, or its best with exactly this batch; if nothing fits, what comes nearest to fitting, with
    the smallest batch."""
    largest = _largest_of_others(setting) if system.extended and batch is None else None
    request = setting.request(system, batch=batch, max_batch=largest)
    plan = try_plan(request)
    if plan is not None:
        return Choice(plan=plan, fits=True)
    return Choice(plan=_nearest(setting.request(system, batch=batch or BATCH_STEP)), fits=False)


def _largest_of_others(setting: Setting) -> int:
    """Recompute and accumulation make any batch possible. So that the extended plan cannot win by ever larger ones, it
    has at most the largest batch that another system of the cell would run."""
    others = (try_plan(setting.request(system)) for system in SYSTEMS if not system.extended)
    return max((plan.batch for plan in others if plan is not None), default=BATCH_STEP)


def _nearest(request: Request) -> Plan:
    """The plan that needs the least more memory, priced for the budget there is."""
    budget = request.budget_bytes
    while budget < _MOST_MEMORY:
        budget = min(int(budget * _MORE_MEMORY), _MOST_MEMORY)
        device = replace(request.cluster.device, memory_bytes=max(budget, request.cluster.device.memory_bytes))
        plan = try_plan(replace(request, memory_bytes=budget, cluster=replace(request.cluster, device=device)))
        if plan is not None:
            return priced(request, _strategies(plan), micro_batches=plan.micro_batches)
    raise InvalidInput(
        f"space {request.space!r}: no plan for {request.model.name} on {request.cluster.devices} devices whatever the "
        "memory: heads or samples do not divide; leave the system out"
    )


def _strategies(plan: Plan) -> list[list[str]]:
    return [[layer.strategy for layer in stage.layers] for stage in plan.stages]


def without_slowdown(setting: Setting, system: System, plan: Plan) -> float:
    """Seconds of an iteration of the same plan if computation and communication did not slow each other down."""
    request = setting.request(system, batch=plan.batch)
    calm = replace(request, cluster=replace(request.cluster, overlap_slowdown=1.0))
    return priced(calm, _strategies(plan), micro_batches=plan.micro_batches).iteration_s


def described(plan: Plan) -> tuple[str, ...]:
    """The plan in short, a stage each."""

    return tuple(
        "; ".join(
            f"{layer.layer}{f'×{count}' if count > 1 else ''} {layer.strategy}"
            for layer, count in layer_runs(stage.layers)
        )
        for stage in plan.stages
    )
