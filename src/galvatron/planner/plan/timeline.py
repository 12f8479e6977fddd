"""One predicted iteration as a timeline: what each stage does when, in the order of its schedule.

The order is the schedule's, and the times are the plan's: a pass starts when the stage is free and its input is there.
Passes take the stage's mean times, divided between forward and backward as the cost model divides computation and
transfers. What a stage does once an iteration stands at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from galvatron.core.spec import Action, Pass, schedule_named
from galvatron.planner.cost import computation
from galvatron.planner.cost.arrays import layer_arrays, strategy_arrays
from galvatron.planner.plan.explain import request_of
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import PlannedStage

__all__ = ["Part", "PassTimes", "Span", "Timeline", "pass_times", "timeline"]

RECEIVE, SYNC, OPTIMIZER, WAIT, STEADY = "receive", "gradient sync", "optimizer", "wait", "steady"
_INSIDE = {
    "compute": "compute_s",
    "TP": "tp_s",
    "EP": "ep_s",
    "CP": "cp_s",
    "SDP": "sdp_s",
    "layout": "layout_s",
}
"""Parts of a pass, by their field of :class:`~galvatron.planner.plan.record.TimeUse`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of a pass: computation, or one kind of exposed communication, summed over its layers."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PassTimes:
    """What a stage's passes of one micro-batch take, in seconds."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    receive_forward_s: float
    receive_backward_s: float

    def parts(self, kind: Pass) -> tuple[Part, ...]:
        return self.forward if kind is Pass.FORWARD else self.backward

    def receive_s(self, kind: Pass) -> float:
        return self.receive_forward_s if kind is Pass.FORWARD else self.receive_backward_s


@dataclass(frozen=True, slots=True)
class Span:
    """What a stage does from when to when, in seconds from the start of the iteration."""

    stage: int
    name: str
    """forward, backward, receive, gradient sync, optimizer, wait; steady: several passes, where they are shortened."""
    start_s: float
    end_s: float
    micro_batch: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration, stage by stage in the order of time. Every moment of every stage belongs to one span."""

    stages: tuple[tuple[Span, ...], ...]
    end_s: float
    """Where the last stage ends."""
    scaled: float = 1.0
    """Where devices share cores, a stage is faster while others wait: times are those of the plan's stages times this,
    so that the iteration takes what the plan says."""

    def waiting_s(self, stage: int) -> float:
        return sum(span.seconds for span in self.stages[stage] if span.name == WAIT)

    def shortened(self, most: int) -> Timeline:
        """With at most about so many spans: the first and last ones of each stage, and one for those between."""
        each = max(8, most // len(self.stages) // 2)
        return replace(self, stages=tuple(_shortened(spans, each) for spans in self.stages))


def _shortened(spans: tuple[Span, ...], each: int) -> tuple[Span, ...]:
    if len(spans) <= 2 * each + 1:
        return spans
    between = spans[each:-each]
    steady = Span(between[0].stage, STEADY, between[0].start_s, between[-1].end_s)
    return (*spans[:each], steady, *spans[-each:])


def timeline(plan: Plan) -> Timeline:
    """What the plan's stages do in one iteration."""
    times = pass_times(plan)
    schedule, degree = schedule_named(plan.schedule), plan.pipeline_degree
    orders = [schedule.actions(number, degree, plan.micro_batches) for number in range(degree)]
    spans = _run(orders, times, schedule.chunks)
    stages = [(*done, *_once(number, plan.stages[number], done[-1].end_s)) for number, done in enumerate(spans)]
    end_s = max(done[-1].end_s for done in stages)
    whole = Timeline(tuple(tuple(_with_waits(number, done, end_s)) for number, done in enumerate(stages)), end_s)
    if plan.cluster.facts.compute_contention > 1 and degree > 1:
        return _scaled(whole, plan.iteration_s / end_s)
    return whole


def pass_times(plan: Plan) -> tuple[PassTimes, ...]:
    """Of each stage. Computation and transfers are divided as the cost model has them; communication inside passes as
    the computation of their stage is."""
    request = request_of(plan)
    cost = request.problem().cost
    names = [kind.name for kind in request.model.kinds]
    kinds = [names.index(layer.name) for layer in request.model.layers]
    strategies = tuple(dict.fromkeys(strategy for stage in plan.stages for strategy in stage.strategies))
    layers = layer_arrays(cost.model, cost.cluster, cost.profile, strategies)
    arrays = strategy_arrays(strategies, cost.cluster)
    samples = plan.micro_batch / arrays.data
    shape = (len(names), len(strategies))
    forward_s = np.broadcast_to(computation.forward_s(samples, layers), shape)
    backward_s = np.broadcast_to(computation.backward_s(samples, layers, arrays), shape)
    costs = cost.stage(strategies, plan.pipeline_degree)
    transfer_ns, gradient_ns = costs.transfer_ns(plan.micro_batch), costs.gradient_transfer_ns(plan.micro_batch)
    found = []
    for stage in plan.stages:
        rows = [kinds[layer.index] for layer in stage.layers]
        columns = [strategies.index(strategy) for strategy in stage.strategies]
        forward, backward = float(forward_s[rows, columns].sum()), float(backward_s[rows, columns].sum())
        share = forward / (forward + backward) if forward + backward else 1.0
        first, last = stage.layers[0].index, stage.layers[-1].index
        receives = int(transfer_ns[kinds[first - 1], costs.layout_of[columns[0]]]) if first else 0
        returns = int(gradient_ns[kinds[last], costs.layout_of[columns[-1]]]) if last + 1 < len(kinds) else 0
        found.append(
            PassTimes(_parts(stage, share), _parts(stage, 1 - share), receives / 1e9, returns / 1e9),
        )
    return tuple(found)


def _parts(stage: PlannedStage, share: float) -> tuple[Part, ...]:
    every = (Part(name, share * getattr(stage.time, field)) for name, field in _INSIDE.items())
    return tuple(part for part in every if part.seconds > 0)


def _run(orders: Sequence[Sequence[Action]], times: Sequence[PassTimes], chunks: int) -> list[list[Span]]:
    """Each stage does its passes in order, as soon as their input is there; receiving it takes the stage's time."""
    done: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    places = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                action = order[places[stage]]
                needed = _input_of(stage, action, len(orders), chunks)
                if needed is not None and needed not in done:
                    break
                free = spans[stage][-1].end_s if spans[stage] else 0.0
                spans[stage] += _pass(stage, action, max(free, done[needed] if needed else 0.0), times[stage], chunks)
                done[stage, action] = spans[stage][-1].end_s
                places[stage] += 1
                moved = True
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise AssertionError("a schedule whose stages wait for each other")
    return spans


def _input_of(stage: int, action: Action, stages: int, chunks: int) -> tuple[int, Action] | None:
    """The pass whose output this one needs, on which stage; None: the batch, or the stage's own forward."""
    step = 1 if action.kind is Pass.FORWARD else -1
    before = stage - step
    if 0 <= before < stages:
        return before, action
    chunk = action.chunk - step
    return (before % stages, replace(action, chunk=chunk)) if 0 <= chunk < chunks else None


def _pass(stage: int, action: Action, start_s: float, times: PassTimes, chunks: int) -> Iterator[Span]:
    receive_s = times.receive_s(action.kind) / chunks
    if receive_s:
        yield Span(stage, RECEIVE, start_s, start_s + receive_s, action.micro_batch)
    parts = tuple(replace(part, seconds=part.seconds / chunks) for part in times.parts(action.kind))
    begin_s = start_s + receive_s
    yield Span(stage, action.kind, begin_s, begin_s + sum(part.seconds for part in parts), action.micro_batch, parts)


def _once(number: int, stage: PlannedStage, start_s: float) -> Iterator[Span]:
    """What follows the last backward."""
    for name, seconds in ((SYNC, stage.time.sync_s), (OPTIMIZER, stage.time.optimizer_s)):
        if seconds > 0:
            yield Span(number, name, start_s, start_s + seconds)
            start_s += seconds


def _with_waits(number: int, spans: Sequence[Span], end_s: float) -> Iterator[Span]:
    """The spans with those between them in which the stage waits."""
    edges = [Span(number, WAIT, 0.0, 0.0), *spans, Span(number, WAIT, end_s, end_s)]
    for before, after in pairwise(edges):
        if before.seconds > 0:
            yield before
        if after.start_s > before.end_s:
            yield Span(number, WAIT, before.end_s, after.start_s)


def _scaled(whole: Timeline, factor: float) -> Timeline:
    def scaled(span: Span) -> Span:
        parts = tuple(replace(part, seconds=factor * part.seconds) for part in span.parts)
        return replace(span, start_s=factor * span.start_s, end_s=factor * span.end_s, parts=parts)

    return Timeline(
        tuple(tuple(scaled(span) for span in spans) for spans in whole.stages), factor * whole.end_s, factor
    )
