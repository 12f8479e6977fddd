"""A plan written by hand, priced like any other: for baselines, experiments, and plans that came from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Kind, Strategy
from galvatron.planner.cost import Pace, iteration_ns
from galvatron.planner.cost.model import NEVER, StageCosts
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.record import (
    FORMAT_VERSION,
    ClusterFacts,
    MemoryUse,
    ModelFacts,
    PlannedLayer,
    PlannedStage,
    SpaceFacts,
    TimeUse,
)

__all__ = ["priced"]


def priced(request: Request, stages: Sequence[Sequence[Strategy | str]], *, micro_batches: int = 1) -> Plan:
    """The plan that gives each layer of each stage this strategy, with what it costs on the request's cluster.

    The request must fix the batch. A plan above the budget is priced too (``memory_bytes`` says by how much), but a
    file of it would be refused.
    """
    if request.batch is None or request.batch % micro_batches:
        raise InvalidInput(
            f"batch: {request.batch} given; expected one that divides into {micro_batches} micro-batches"
        )
    strategies = [[_strategy(strategy) for strategy in stage] for stage in stages]
    _check(request, strategies)
    first, written, times = 0, [], []
    for number in range(len(strategies)):
        stage, stage_ns = _stage(request, strategies, number, first, micro_batches)
        first += len(strategies[number])
        written.append(stage)
        times.append(stage_ns)
    pace = Pace.of(request.schedule, len(strategies), micro_batches, request.cluster.compute_contention)
    total_ns = iteration_ns(times, pace)
    return Plan(
        version=FORMAT_VERSION,
        model=ModelFacts.of(request.model),
        cluster=ClusterFacts(digest=request.cluster.digest, devices=request.cluster.devices, facts=request.cluster),
        profile=request.profile,
        space=SpaceFacts(
            name=request.space,
            **asdict(request.effective_switches),
            cuts=request.cuts.value,
            conventions=request.conventions.name,
            batches=request.batches,
            max_micro_batches=request.max_micro_batches,
        ),
        memory_budget_bytes=request.budget_bytes,
        schedule=request.schedule.name,
        batch=request.batch,
        micro_batches=micro_batches,
        throughput=request.batch / total_ns * 1e9,
        iteration_s=total_ns / 1e9,
        bubble_s=max(0, total_ns - micro_batches * max(times)) / 1e9,
        stages=tuple(written),
        certificate=None,
    )


def _strategy(given: Strategy | str) -> Strategy:
    return Strategy.parse(given) if isinstance(given, str) else given


def _check(request: Request, stages: Sequence[Sequence[Strategy]]) -> None:
    devices, layers = request.cluster.devices, len(request.model.layers)
    if not stages or devices % len(stages):
        raise InvalidInput(f"stages: {len(stages)} given; their number must divide the {devices} devices")
    if sum(map(len, stages)) != layers or not all(stages):
        raise InvalidInput(
            f"stages: strategies for {sum(map(len, stages))} layers given; {request.model.name} has {layers}, and each "
            "stage needs at least one"
        )
    size = devices // len(stages)
    for number, stage in enumerate(stages):
        for strategy in stage:
            if strategy.devices != size:
                raise InvalidInput(
                    f"stage {number}: {str(strategy)!r} is for {strategy.devices} devices; the stage has {size}"
                )


def _stage(
    request: Request, stages: Sequence[Sequence[Strategy]], number: int, first: int, micro_batches: int
) -> tuple[PlannedStage, int]:
    """One stage and its mean time of a micro-batch in nanoseconds."""
    assert request.batch is not None
    chosen = stages[number]
    costs: StageCosts = request.problem().cost.stage(tuple(dict.fromkeys(chosen)), len(stages))
    layers = request.model.layers[first : first + len(chosen)]
    names = [kind.name for kind in request.model.kinds]
    rows = np.array([names.index(layer.name) for layer in layers])
    columns = np.array([costs.strategies.index(strategy) for strategy in chosen])
    micro_batch = request.batch // micro_batches
    tables = costs.tables(np.array(micro_batch), np.array(micro_batches))
    times = tables.time_ns[rows, columns]
    impossible = np.flatnonzero(times >= NEVER)
    if len(impossible):
        place = int(impossible[0])
        kind, strategy = layers[place], chosen[place]
        whole = strategy.degree(Kind.TP) > 1 and kind.tensor_parallel is None
        reason = "TP cannot split it" if whole else "heads, tokens or samples do not divide"
        raise InvalidInput(
            f"layer {first + place} ({kind.name}): strategy {str(strategy)!r} cannot run it in "
            f"micro-batches of {micro_batch}: {reason}"
        )
    layouts = costs.layout_of[columns]
    change = costs.change_ns(micro_batch)[rows[:-1], layouts[:-1], layouts[1:]].sum()
    moves = costs.transfer_ns(micro_batch)
    transfer = 0
    if first > 0:
        transfer += int(moves[names.index(request.model.layers[first - 1].name), layouts[0]])
    if first + len(chosen) < len(request.model.layers):
        transfer += int(moves[rows[-1], layouts[-1]])
    borrowed = costs.resplit_in(rows, columns, micro_batch, first=first == 0)
    flying = request.schedule.in_flight(number, len(stages), micro_batches)
    memory = MemoryUse(
        states=int(tables.state_bytes[rows, columns].sum()),
        activations=int((tables.activation_bytes[rows, columns] + borrowed.activation_bytes).sum()) * flying,
        transient=int((tables.transient_bytes[rows, columns] + borrowed.transient_bytes).max()),
        reserved=request.cluster.reserved_bytes,
    )
    parts = costs.layer_costs(np.array(micro_batch))

    def total(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
        return float(np.broadcast_to(table, tables.time_ns.shape)[rows, columns].sum())

    size = request.cluster.devices // len(stages)
    stage_ns = int(times.sum()) + int(borrowed.time_ns.sum()) + int(change) + transfer
    stage = PlannedStage(
        devices=tuple(range(number * size, (number + 1) * size)),
        layers=tuple(
            PlannedLayer(index=first + place, layer=layer.name, strategy=str(strategy))
            for place, (layer, strategy) in enumerate(zip(layers, chosen, strict=True))
        ),
        time_s=stage_ns / 1e9,
        time=TimeUse(
            compute_s=total(parts.compute_s),
            tp_s=total(parts.tp_s) + float(borrowed.time_ns.sum()) / 1e9,
            sdp_s=total(parts.sdp_s),
            layout_s=float(change) / 1e9,
            transfer_s=transfer / 1e9,
            sync_s=total(parts.sync_s),
            optimizer_s=total(parts.optimizer_s),
        ),
        in_flight=flying,
        memory_bytes=sum(asdict(memory).values()),
        memory=memory,
    )
    return stage, stage_ns
