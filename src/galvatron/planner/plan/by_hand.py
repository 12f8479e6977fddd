"""A plan written by hand, priced like any other: for baselines, experiments, and plans that came from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Strategy
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Decisions, Request, written_out

__all__ = ["priced"]


def priced(request: Request, stages: Sequence[Sequence[Strategy | str]], *, micro_batches: int = 1) -> Plan:
    """The plan that gives each layer of each stage this strategy, with what it costs on the request's cluster.

    The request must fix the batch. A plan above the budget is priced too (``memory_bytes`` says by how much), but a
    file of it would be refused.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, Integral) or micro_batches < 1:
        raise InvalidInput(f"micro_batches: {micro_batches!r} given; expected a whole number from 1 on")
    micro_batches = int(micro_batches)  # numpy's are none that a file may hold
    if not _is_list(stages) or not all(map(_is_list, stages)):
        raise InvalidInput(
            "stages: expected a list of stages, each a list with a strategy for each of its layers, such as "
            '[["dp4"] * 14]'
        )
    if request.batch is None or request.batch % micro_batches:
        raise InvalidInput(
            f"batch: {request.batch} given; expected one that divides into {micro_batches} micro-batches"
        )
    strategies = tuple(tuple(_strategy(strategy) for strategy in stage) for stage in stages)
    _check(request, strategies)
    decisions = Decisions(batch=request.batch, micro_batches=micro_batches, stages=strategies)
    plan = written_out(request, decisions, certificate=None)
    # Rounded as in all plans by hand so far (the search's differ in the last digit), so that their files stay the same.
    return replace(plan, throughput=plan.batch / round(plan.iteration_s * 1e9) * 1e9)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _strategy(given: Strategy | str) -> Strategy:
    if not isinstance(given, Strategy | str):
        raise InvalidInput(f"stages: {given!r} given for a layer; expected a strategy such as 'dp4' or 'sdp2-tp2'")
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
