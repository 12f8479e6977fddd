"""Plans that say what to run and of costs nothing: for checks, which need no planner. No torch before a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron.core.spec import ONE_F_ONE_B, LayerSpec, Strategy, Training
from galvatron.families import load_cluster
from galvatron.families.huggingface import model_of_config
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import (
    FORMAT_VERSION,
    ClusterFacts,
    LayerRun,
    MemoryUse,
    ModelFacts,
    PlannedLayer,
    PlannedStage,
    SpaceFacts,
    TimeUse,
)

if TYPE_CHECKING:
    from galvatron.families.layer import LayeredModel

__all__ = ["facts_of", "unpriced"]

_TOKENS = 5040
"""Of a sample that nobody counts: every degree up to ten divides it, and 16 does."""


def facts_of(layered: LayeredModel, training: Training, name: str) -> ModelFacts:
    """What a plan says of the model, as far as running it takes: sizes of activations and work are left out."""
    from galvatron.families.generic.adapter import Generic

    config: Any = getattr(layered.model, "config", None)
    if isinstance(layered, Generic):
        kinds = tuple(
            LayerSpec(
                name=kind,
                parameters=sum(own.numel() for own in layer.parameters()),
                forward_flops=0,
                split_activation_bytes=0,
                boundary_bytes=0,
                tensor_parallel=layered.tensor_parallel(layer, tokens=_TOKENS),
            )
            for kind, layer in {layer.kind: layer for layer in reversed(layered.layers)}.items()
        )
    else:
        content = json.loads(config.to_json_string(use_diff=False))
        kinds = model_of_config(content, Path("config.json"), name, training).kinds
    runs = groupby(layer.kind for layer in layered.layers)
    return ModelFacts(
        name=name,
        family="generic" if isinstance(layered, Generic) else config.model_type,
        digest="",
        parameters=sum(own.numel() for own in layered.model.parameters()),
        training=training,
        kinds=kinds,
        order=tuple(LayerRun(layer=kind, count=len(list(run))) for kind, run in runs),
        config=None,
    )


def unpriced(facts: ModelFacts, stages: Sequence[Sequence[str]]) -> Plan:
    """A plan that says what to run, and of costs nothing."""
    cluster = load_cluster("cpu-4")
    kinds = [run.layer for run in facts.order for _ in range(run.count)]
    devices = _devices_of(stages)
    each, first, written = devices // len(stages), 0, []
    for number, strategies in enumerate(stages):
        written.append(
            PlannedStage(
                devices=tuple(range(number * each, (number + 1) * each)),
                layers=tuple(
                    PlannedLayer(index=first + place, layer=kinds[first + place], strategy=strategy)
                    for place, strategy in enumerate(strategies)
                ),
                time_s=0.0,
                time=TimeUse(
                    compute_s=0.0, tp_s=0.0, sdp_s=0.0, layout_s=0.0, transfer_s=0.0, sync_s=0.0, optimizer_s=0.0
                ),
                in_flight=1,
                memory_bytes=0,
                memory=MemoryUse(states=0, activations=0, transient=0, reserved=0),
            )
        )
        first += len(strategies)
    micro_batches = 2 * len(stages)
    return Plan(
        version=FORMAT_VERSION,
        model=facts,
        cluster=ClusterFacts(digest=cluster.digest, devices=devices, facts=cluster),
        profile=None,
        space=SpaceFacts(
            name="full",
            recompute=True,
            selective_recompute=True,
            recompute_but_attention=True,
            offload=True,
            sequence_parallel=True,
            zero2=True,
            hybrid_sharding=True,
            accumulation=True,
            cuts="exact",
            conventions="galvatron",
            batches=(),
            max_micro_batches=None,
        ),
        memory_budget_bytes=cluster.device.memory_bytes,
        schedule=ONE_F_ONE_B.name,
        batch=devices * micro_batches,
        micro_batches=micro_batches,
        throughput=0.0,
        iteration_s=0.0,
        bubble_s=0.0,
        stages=tuple(written),
        certificate=None,
    )


def _devices_of(stages: Sequence[Sequence[str]]) -> int:
    return len(stages) * Strategy.parse(stages[0][0]).devices
