"""What people ask next: twice the devices, other memory, another batch, each as a question of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import cluster_names, dump_cluster
from galvatron.core.files.nodes import named_size
from galvatron.core.spec import Cluster
from galvatron.core.units import format_bytes
from galvatron.planner.plan.plan import Plan
from galvatron.studio.question import Question, Thing

__all__ = ["WhatIf", "what_ifs"]

_MEMORY = ((3, 2), (1, 2))
_BATCH = ((2, 1), (1, 2))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One thing changed."""

    label: str
    question: Question


def what_ifs(question: Question, plan: Plan) -> tuple[WhatIf, ...]:
    """Single changes of a question that has this plan as its answer."""
    return (*_devices(question), *_memory(question, plan), *_batches(question, plan), *_lengths(question, plan))


def _devices(question: Question) -> Iterator[WhatIf]:
    cluster = question.request.cluster
    now = cluster.devices
    if question.cluster.name is not None:
        size = named_size(question.cluster.name)
        kind = size.kind if size is not None and size.kind in cluster_names() else question.cluster.name
        for devices in (2 * now, now // 2):
            other = question.changed(cluster=Thing(name=kind), devices=devices)
            if _means_something(other):
                yield WhatIf(f"{devices} devices instead of {now}", other)
        return
    if not cluster.levels:
        return
    *inner, outer = cluster.levels
    twice = replace(cluster, levels=(*inner, replace(outer, units=2 * outer.units)))
    yield _on(question, twice, f"{2 * now} devices instead of {now}, joined by the same {outer.name!r}")
    if now % 2 == 0:
        yield _on(question, cluster.shrunk(now // 2), f"{now // 2} devices instead of {now}")


def _means_something(question: Question) -> bool:
    try:
        return question.request is not None
    except InvalidInput:  # a preset has no such number of devices
        return False


def _memory(question: Question, plan: Plan) -> Iterator[WhatIf]:
    """Other budgets, on devices of that memory, sold or not."""
    cluster, budget = question.request.cluster, plan.memory_budget_bytes
    for over, under in _MEMORY:
        other = budget * over // under
        label = f"{format_bytes(other)} instead of {format_bytes(budget)}"
        if other <= cluster.device.memory_bytes:
            yield WhatIf(label, question.changed(memory=other))
        else:
            device = replace(cluster.device, memory_bytes=other)
            yield _on(question.changed(memory=other), replace(cluster, device=device), label)


def _batches(question: Question, plan: Plan) -> Iterator[WhatIf]:
    for over, under in _BATCH:
        if plan.batch * over % under == 0:
            batch = plan.batch * over // under
            yield WhatIf(f"batch {batch} instead of {plan.batch}", question.changed(batch=batch))


def _lengths(question: Question, plan: Plan) -> Iterator[WhatIf]:
    """Half the tokens a sample and twice the samples: the same tokens an iteration."""
    length = plan.model.training.sequence_length
    if length is None or length % 2 or plan.model.config is None:
        return
    label = f"{length // 2} tokens a sample instead of {length}, and twice the batch"
    yield WhatIf(label, question.changed(sequence_length=length // 2, batch=2 * plan.batch))


def _on(question: Question, cluster: Cluster, label: str) -> WhatIf:
    """The question on another cluster, which no preset names."""
    there = Thing(file="cluster.toml", text=dump_cluster(cluster))
    setup = {name: value for name, value in question.setup.items() if name not in ("devices", "node_link")}
    return WhatIf(label, replace(question, cluster=there, setup=setup))  # type: ignore[arg-type]
