"""A plan as another system's configuration: as it is, or the best one that the system can run in its place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ModelSpec
from galvatron.planner.exchange.accelerate import ACCELERATE
from galvatron.planner.exchange.automodel import AUTOMODEL
from galvatron.planner.exchange.best import best_for
from galvatron.planner.exchange.deepspeed import DEEPSPEED
from galvatron.planner.exchange.megatron import MEGATRON
from galvatron.planner.exchange.target import Target, refusal
from galvatron.planner.exchange.torchtitan import TORCHTITAN
from galvatron.planner.exchange.uniform import Inexpressible, Uniform, uniform_of
from galvatron.planner.plan.explain import request_of
from galvatron.planner.plan.plan import Plan

__all__ = ["TARGETS", "Export", "export_plan", "target_named"]

TARGETS = (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE, AUTOMODEL)


@dataclass(frozen=True, slots=True)
class Export:
    """What is handed to another system."""

    target: Target
    layout: Uniform
    text: str
    plan: Plan
    """What the text says, priced."""
    asked: Plan
    """What was to be exported."""
    why_not: str
    """Why that could not be, with the layer; empty: it is what the text says."""
    notes: tuple[str, ...]

    @property
    def lost(self) -> float:
        """Share of the throughput that the system cannot have."""
        return 1 - self.plan.throughput / self.asked.throughput


def target_named(name: str) -> Target:
    """The system of this name."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise InvalidInput(f"to: {name!r} is unknown; choose one of {', '.join(target.name for target in TARGETS)}")


def export_plan(plan: Plan, target: Target, *, strict: bool = False) -> Export:
    """The plan for another system. One that it cannot run is replaced by the best that it can, or refused where
    ``strict``."""
    model = plan.model.spec()
    layout, why_not = _expressed(plan, target, model)
    chosen = plan
    if layout is None:
        if strict:
            raise Inexpressible(f"{why_not}; without --strict the best plan that {target.title} can run is written")
        request = replace(request_of(plan), batch=plan.batch, batch_step=None, max_batch=None)
        found = best_for(request, target)
        layout, chosen = found.layout, found.plan
    return Export(
        target=target,
        layout=layout,
        text=target.write(layout, model),
        plan=chosen,
        asked=plan,
        why_not=why_not,
        notes=target.notes(layout, model),
    )


def _expressed(plan: Plan, target: Target, model: ModelSpec) -> tuple[Uniform | None, str]:
    """The layout that the plan is for this system; None: it is none, and why."""
    try:
        layout = uniform_of(plan)
    except Inexpressible as error:
        return None, str(error)
    reason = refusal(target, layout, model)
    if reason is None:
        return layout, ""
    index = len(model.layers) - 1 if layout.fused_loss != target.fused_loss else 1
    strategy = [each for stage in plan.stages for each in stage.layers][index].strategy
    return None, f"layer {index} ({model.layers[index].name}) has strategy {strategy!r}: {target.title} {reason}"
