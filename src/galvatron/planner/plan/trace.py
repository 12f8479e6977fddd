"""A timeline as a trace file: JSON in the Trace Event Format, which Perfetto and chrome://tracing open.

Predicted and measured traces name processes alike (a process a rank, "rank 3 (stage 1)"), so that they stand beside
each other in one window. Times are in microseconds from the start of the iteration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.record import PlanRecord
from galvatron.planner.plan.timeline import WAIT, Span, Timeline

__all__ = [
    "MEASURED",
    "PREDICTED",
    "TraceEvent",
    "predicted_events",
    "process_events",
    "slice_event",
    "write_trace",
]

TraceEvent = dict[str, Any]
"""One entry of ``traceEvents``."""
PREDICTED, MEASURED = "predicted", "measured"
_ORDER = (PREDICTED, MEASURED)
_PASSES = 0
"""The thread that passes are on."""
_MOST_RANKS = 64
"""All ranks of a stage do the same; on larger clusters only the first of each stage is written."""


def predicted_events(plan: PlanRecord, predicted: Timeline) -> list[TraceEvent]:
    """The events of a predicted iteration, rank by rank."""
    every = plan.cluster.devices <= _MOST_RANKS
    ranks = [(rank, number) for number, stage in enumerate(plan.stages) for rank in stage.devices]
    first = {stage.devices[0] for stage in plan.stages}
    events: list[TraceEvent] = []
    for rank, number in ranks:
        if every or rank in first:
            events += process_events(rank, number, PREDICTED)
            for span in predicted.stages[number]:
                events += _span_events(span, _process(rank, PREDICTED))
    return events


def process_events(rank: int, stage: int, what: str) -> list[TraceEvent]:
    """The names of a rank's process and thread; ``what``: predicted or measured. Both of a rank stand together."""
    process = _process(rank, what)

    def named(kind: str, **said: str | int) -> TraceEvent:
        return {"ph": "M", "name": kind, "pid": process, "tid": _PASSES, "args": said}

    return [
        named("process_name", name=f"rank {rank} (stage {stage}) {what}"),
        named("process_sort_index", sort_index=process),
        named("thread_name", name="passes"),
    ]


def slice_event(rank: int, what: str, name: str, start_s: float, seconds: float) -> TraceEvent:
    """One piece of work of a rank."""
    return _slice(_process(rank, what), name, start_s, seconds)


def trace_text(events: Iterable[TraceEvent]) -> str:
    """The text of a file for Perfetto."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}) + "\n"


def write_trace(events: Iterable[TraceEvent], path: str | Path) -> None:
    """Write a file for Perfetto."""
    try:
        Path(path).write_text(trace_text(events), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write a trace to {str(path)!r}: {error.strerror or error}") from error


def _process(rank: int, what: str) -> int:
    return len(_ORDER) * rank + _ORDER.index(what) + 1


def _span_events(span: Span, process: int) -> Iterator[TraceEvent]:
    if span.name == WAIT:
        return  # a gap says it
    number = "" if span.micro_batch is None else f" {span.micro_batch}"
    yield _slice(process, f"{span.name}{number}", span.start_s, span.seconds)
    start_s = span.start_s
    for part in span.parts if len(span.parts) > 1 else ():
        yield _slice(process, part.name, start_s, part.seconds)
        start_s += part.seconds


def _slice(process: int, name: str, start_s: float, seconds: float) -> TraceEvent:
    return {"ph": "X", "name": name, "pid": process, "tid": _PASSES, "ts": start_s * 1e6, "dur": seconds * 1e6}
