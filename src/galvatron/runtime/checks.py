"""Everything that can be wrong with a plan, a model and a world, found before any group or weight exists."""

from __future__ import annotations

from galvatron.errors import InvalidInput, PlanMismatch
from galvatron.models.layer import CutModel
from galvatron.plans.plan import Plan
from galvatron.spec import Kind, Strategy

__all__ = ["check_model", "check_world"]


def check_world(plan: Plan, world: int) -> None:
    """The plan's devices must be the processes there are."""
    devices = sum(len(stage.devices) for stage in plan.stages)
    if devices != world:
        raise PlanMismatch(
            f"world size: {world} processes are running, but the plan is for {devices} devices "
            f"({plan.pipeline_degree} stages of {len(plan.stages[0].devices)}); "
            f"start {devices} processes (torchrun --nproc-per-node …) or plan for {world} devices"
        )


def check_model(plan: Plan, cut: CutModel) -> None:
    """The model's layers must be those the plan was made for, and divisible as it says."""
    planned = [layer.layer for stage in plan.stages for layer in stage.layers]
    kinds = [layer.kind for layer in cut.layers]
    if planned != kinds:
        difference = next(
            (place for place, (ours, theirs) in enumerate(zip(planned, kinds, strict=False)) if ours != theirs),
            min(len(planned), len(kinds)),
        )
        raise PlanMismatch(
            f"model: it has {len(kinds)} layers, the plan {plan.model.name!r} has {len(planned)}; layer {difference} is "
            f"{_at(kinds, difference)}, the plan says {_at(planned, difference)}; plan again for this model"
        )
    sizes = {kind.name: kind.parameters for kind in plan.model.kinds}
    for index, layer in enumerate(cut.layers):
        tables = sum(
            cut.layers[use.layer].get_parameter(use.name).numel()
            for tie in cut.ties
            if tie.small
            for use in tie.uses
            if use.layer == index
        )
        given = sum(parameter.numel() for parameter in layer.parameters()) - tables
        small = sum(
            cut.layers[tie.uses[0].layer].get_parameter(tie.uses[0].name).numel() for tie in cut.ties if tie.small
        )
        if not given <= sizes[layer.kind] <= given + small:
            raise PlanMismatch(
                f"model: layer {index} ({layer.kind}) has {given:,} parameters, the plan was made for "
                f"{sizes[layer.kind]:,}; it is a plan of another model ({plan.model.name!r}): plan again for this one"
            )
    for stage in plan.stages:
        for planned_layer in stage.layers:
            _check_degree(plan, planned_layer.index, Strategy.parse(planned_layer.strategy))


def _at(kinds: list[str], place: int) -> str:
    return repr(kinds[place]) if place < len(kinds) else "missing"


def _check_degree(plan: Plan, index: int, strategy: Strategy) -> None:
    spec = plan.model.spec().layers[index]
    degree = strategy.degree(Kind.TP)
    if not spec.allows_tensor_parallel(degree):
        assert spec.tensor_parallel is not None
        raise InvalidInput(
            f"layer {index} ({spec.name}): strategy {str(strategy)!r} splits it {degree} ways, which must divide "
            f"{' and '.join(str(count) for count in spec.tensor_parallel.divides)} (its heads)"
        )
