"""The step that ``--trace`` names, as it was measured on all ranks, beside the iteration that the plan predicts.

PyTorch's profiler writes a file a rank with every kernel. This takes the passes out of them (forward, backward,
waiting to receive) and puts them into one file with the plan's own. No torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.timeline import timeline
from galvatron.planner.plan.trace import (
    MEASURED,
    TraceEvent,
    predicted_events,
    process_events,
    slice_event,
    write_trace,
)
from galvatron.train.run_folder import RunFolder

__all__ = ["measured_passes", "write_both_traces"]

_PASS = re.compile(r"(forward|backward|receive) \d+|optimizer")
_STEP = re.compile(r"step \d+")
_DEVICE, _HOST = "gpu_user_annotation", "user_annotation"


def measured_passes(path: Path) -> list[tuple[str, float, float]]:
    """(name, start, seconds) of the passes that PyTorch's profiler saw, from the start of the step.

    On a GPU they are what the device did, not what its host asked for.
    """
    events: list[TraceEvent] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    named = [event for event in events if event.get("cat") in (_DEVICE, _HOST) and event.get("ph") == "X"]
    steps = [event for event in named if event["cat"] == _HOST and _STEP.fullmatch(event["name"])]
    passes = [event for event in named if _PASS.fullmatch(event["name"])]
    where = _DEVICE if any(event["cat"] == _DEVICE for event in passes) else _HOST
    begin = min((event["ts"] for event in steps), default=0.0)
    found = [
        (event["name"], (event["ts"] - begin) / 1e6, event["dur"] / 1e6) for event in passes if event["cat"] == where
    ]
    return sorted(found, key=lambda each: each[1])


def write_both_traces(folder: RunFolder, plan: Plan) -> None:
    """One file of both, from the files of those ranks that are on this machine; nothing where there are none."""
    events: list[TraceEvent] = []
    for number, stage in enumerate(plan.stages):
        for rank in stage.devices:
            file = folder.trace_file(rank)
            if file.exists():
                events += process_events(rank, number, MEASURED)
                events += [slice_event(rank, MEASURED, *each) for each in measured_passes(file)]
    if events:
        write_trace([*predicted_events(plan, timeline(plan)), *events], folder.both_traces_file)
