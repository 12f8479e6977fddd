"""A traced step of a real run stands beside the plan's own iteration: the same passes, in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs import plan_of, run_to_end

from galvatron.train.settings import Settings


def _passes(events: list[dict[str, Any]], process: str) -> list[str]:
    (pid,) = [event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"] == process]
    own = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
    named = sorted((event["ts"], event["name"]) for event in own)
    return [name for _, name in named if name.split()[0] in ("forward", "backward")]


def test_both_traces_have_the_same_passes(tmp_path: Path) -> None:
    plan = plan_of(["single", "single"], ["single", "single"], micro_batches=4)
    job = run_to_end(tmp_path, plan, Settings(steps=3, trace_step=2))
    events = json.loads(job.folder.both_traces_file.read_text())["traceEvents"]
    for rank in range(2):
        predicted, measured = (
            _passes(events, f"rank {rank} (stage {rank}) {what}") for what in ("predicted", "measured")
        )
        assert predicted == measured
        assert len(measured) == 8
    receives = [event for event in events if event["name"].startswith("receive ")]
    assert {event["name"] for event in receives} == {f"receive {number}" for number in range(4)}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in receives)
