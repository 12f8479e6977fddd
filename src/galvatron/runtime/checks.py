"""Everything that can be wrong with a plan, a model and a world, found before any group or weight exists."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput, PlanMismatch
from galvatron.core.spec import Kind, LayerSpec, Strategy, schedule_named
from galvatron.core.spec.tuning import stock_kind
from galvatron.families.altered import check_called, check_split
from galvatron.families.discovery import family_of
from galvatron.families.generic.adapter import Generic
from galvatron.families.huggingface import model_of_config
from galvatron.families.layer import LayeredModel
from galvatron.families.lora import is_adapter, lora_of
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.experts.checks import check_experts

__all__ = ["check_model", "check_schedule", "check_unaltered", "check_world", "kinds_of", "uses"]


def check_world(plan: Plan, world: int) -> None:
    """The plan's devices must be the processes there are."""
    devices = sum(len(stage.devices) for stage in plan.stages)
    if devices != world:
        raise PlanMismatch(
            f"world size: {world} processes are running, but the plan is for {devices} devices "
            f"({plan.pipeline_degree} stages of {len(plan.stages[0].devices)}); "
            f"start {devices} processes (torchrun --nproc-per-node …) or plan for {world} devices"
        )


def check_schedule(plan: Plan) -> None:
    """A stage runs as one chunk of consecutive layers."""
    schedule = schedule_named(plan.schedule)
    if schedule.chunks > 1 and plan.pipeline_degree > 1:
        raise InvalidInput(
            f"schedule: {schedule.title} ({schedule.name!r}) cuts each stage into {schedule.chunks} chunks of layers, "
            "which can be planned, but not run; plan with another schedule (--schedule 1f1b)"
        )


def check_model(plan: Plan, layered: LayeredModel) -> None:
    """The model's layers must be those the plan was made for, and divisible as it says."""
    if layered.first_trained == len(layered.layers):
        raise InvalidInput(
            "model: all of its parameters are frozen, so there is nothing to train; unfreeze some of them"
        )
    planned = [stock_kind(layer.layer) for stage in plan.stages for layer in stage.layers]
    kinds = [layer.kind for layer in layered.layers]
    if planned != kinds:
        pairs = enumerate(zip(planned, kinds, strict=False))
        place = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(planned), len(kinds)))
        raise PlanMismatch(
            f"model: it has {len(kinds)} layers, the plan for {plan.model.name!r} has {len(planned)}; layer {place} is "
            f"{_at(kinds, place)}, the plan says {_at(planned, place)}; plan again "
            "for this model, with galvatron.describe if it was changed"
        )
    ours = {kind.name: kind for kind in kinds_of(plan, layered)}
    _check_adapters(plan, layered)
    for kind in (kind.untuned() for kind in plan.model.kinds):
        if ours[kind.name].parameters != kind.parameters:
            raise PlanMismatch(
                f"model: its layer {kind.name!r} has {ours[kind.name].parameters:,} parameters, the plan for "
                f"{plan.model.name!r} says {kind.parameters:,}; it is a plan of another model: plan again "
                "for this one, with galvatron.describe if it was changed"
            )
    planned_kinds = {kind.name: kind for kind in plan.model.kinds}
    for number, stage in enumerate(plan.stages):
        for place, layer in enumerate(stage.layers):
            field = f"stages[{number}].layers[{place}].strategy ({layer.layer})"
            strategy = Strategy.parse(layer.strategy)
            _check_sequence(layered, field, strategy)
            _check_degree(ours[stock_kind(layer.layer)], field, strategy)
            facts = planned_kinds.get(layer.layer) or planned_kinds[stock_kind(layer.layer)]  # a trial's are untuned
            if strategy.degree(Kind.TP) > 1 and facts.tensor_parallel and not layered.layers[layer.index].rules:
                raise InvalidInput(
                    f"{field}: {layer.strategy!r} splits a layer that TP cannot split in the model that was given; "
                    "plan for that model (galvatron.describe), or without TP (--space dp+pp)"
                )
            _check_context(layered, layer.index, field, strategy, facts)
            check_experts(layered, layer.index, field, strategy)
            if strategy.fused_loss and layered.layers[layer.index].projection is None:
                raise InvalidInput(
                    f"{field}: {layer.strategy!r} fuses projection and loss, but this layer has none that can be: the "
                    "model changes its logits, or they are not its last step; leave +fl out"
                )


def check_unaltered(plan: Plan, layered: LayeredModel, altered: Mapping[str, str]) -> None:
    """What people changed of a stock model's modules (``altered``, of :mod:`galvatron.families.altered`) must be
    called, and with what it sees in one process."""
    check_called(layered, altered)
    for layer in (layer for stage in plan.stages for layer in stage.layers):
        strategy, own = Strategy.parse(layer.strategy), layered.layers[layer.index]
        if own.rules and strategy.degree(Kind.TP) > 1:
            check_split(own, altered, sequence=strategy.sequence_parallel)


def _check_adapters(plan: Plan, layered: LayeredModel) -> None:
    """The model must have the adapters that the plan counts on."""
    planned_lora, own_lora = plan.model.training.lora, lora_of(layered.model)
    if planned_lora and own_lora and not math.isclose(planned_lora.alpha, own_lora.alpha):
        raise PlanMismatch(
            f"model: its adapters have alpha {own_lora.alpha:g}, those in the plan {planned_lora.alpha:g}; plan again "
            "for this model (galvatron.plan(peft_model), or --lora)"
        )
    kinds = {kind.name: kind.tuning for kind in plan.model.kinds}
    for layer, own in zip((layer for stage in plan.stages for layer in stage.layers), layered.layers, strict=True):
        tuning = kinds.get(layer.layer)
        planned = 0 if tuning is None else tuning.adapter_parameters
        found = sum(each.numel() for _, stock, each in own.stock_parameters() if is_adapter(stock))
        if found != planned and layer.layer in kinds:
            raise PlanMismatch(
                f"model: adapters of its layer {layer.index} ({own.kind}) have {found:,} parameters, those in the plan "
                f"{planned:,}; plan again for this model (galvatron.plan(peft_model), or --lora)"
            )


def uses(plan: Plan, *switches: str) -> bool:
    """Whether any layer uses one of these switches."""
    strategies = {layer.strategy for stage in plan.stages for layer in stage.layers}
    return any(getattr(Strategy.parse(text), name) for text in strategies for name in switches)


def _at(kinds: list[str], place: int) -> str:
    return repr(kinds[place]) if place < len(kinds) else "missing"


def kinds_of(plan: Plan, layered: LayeredModel) -> tuple[LayerSpec, ...]:
    """The model's own layers: from its configuration where the planner knows the family, else counted, as far as
    running them takes: of sizes and work nothing."""
    config: Any = getattr(layered.model, "config", None)
    if not isinstance(layered, Generic) and family_of(getattr(config, "model_type", None)) is not None:
        content = json.loads(config.to_json_string(use_diff=False))
        training = plan.model.training.untuned()
        return model_of_config(content, Path("model.config"), plan.model.name, training).kinds
    planned = {stock_kind(kind.name): kind for kind in plan.model.kinds}
    counts = {
        layer.kind: sum(own.numel() for _, stock, own in layer.stock_parameters() if not is_adapter(stock))
        for layer in layered.layers
    }
    return tuple(
        LayerSpec(
            name=name,
            parameters=count,
            forward_flops=0,
            split_activation_bytes=0,
            boundary_bytes=0,
            tensor_parallel=planned[name].tensor_parallel,
            context=planned[name].context,
        )
        for name, count in counts.items()
    )


def _check_sequence(layered: LayeredModel, field: str, strategy: Strategy) -> None:
    if strategy.layout.sequence and layered.wide_activations:
        raise InvalidInput(
            f"{field}: {str(strategy)!r} divides sequences, but the loss of this model has a term for the balance of "
            "experts, which is counted by whole sequences; leave +sp, ring and ulysses out"
        )


def _check_context(layered: LayeredModel, index: int, field: str, strategy: Strategy, kind: LayerSpec) -> None:
    """``kind``: as the plan has it. Batches of other lengths than planned are checked when they come."""
    if not strategy.context_factors:
        return
    reason = layered.why_undivided(index)
    if reason is not None:
        raise InvalidInput(
            f"{field}: {str(strategy)!r} divides sequences, but {reason}; plan without context parallelism "
            "(--no-context-parallel)"
        )
    problem = None if kind.context is None else kind.context.problem(strategy)
    if problem is not None:
        raise InvalidInput(
            f"{field}: {str(strategy)!r} cannot divide its sequences: {problem}; take another degree, or plan again"
        )


def _check_degree(kind: LayerSpec, field: str, strategy: Strategy) -> None:
    degree = strategy.degree(Kind.TP)
    if not kind.allows_tensor_parallel(degree):
        assert kind.tensor_parallel is not None
        raise InvalidInput(
            f"{field}: {str(strategy)!r} splits it {degree} ways, which must "
            f"divide {' and '.join(str(count) for count in kind.tensor_parallel.divides)}, its attention heads"
        )
    if strategy.sequence_parallel and not kind.allows_sequence_parallel(degree):
        raise InvalidInput(
            f"{field}: {str(strategy)!r} divides the sequence {degree} ways, which this layer cannot; leave +sp out"
        )
