"""The predicted iteration: in the schedule's order, at the plan's times, as long as a simulation and the plan say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from jobs import plan_of

import galvatron
from galvatron.core.spec import Pass, schedule_named
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.setup import Setup, request_for
from galvatron.planner.plan.timeline import pass_times, timeline
from galvatron.planner.plan.trace import predicted_events, write_trace


def _pipeline(schedule: str = "1f1b") -> galvatron.Plan:
    """Four uneven stages of mixed strategies, eight micro-batches."""
    request = request_for("bert-large", "titan-rtx-8", Setup(batch=64, schedule=schedule))
    stages = [["dp2"] * 7, ["tp2"] * 6, ["sdp2+rc"] * 5, ["dp2"] * 4 + ["tp2"] * 4]
    return priced(request, stages, micro_batches=8)


def _simulated(plan: galvatron.Plan) -> float:
    """The iteration's end, by the longest path through all passes: written down without the timeline's code."""
    times = pass_times(plan)
    durations = {
        kind: [sum(part.seconds for part in each.parts(kind)) + each.receive_s(kind) for each in times] for kind in Pass
    }
    schedule, degree = schedule_named(plan.schedule), plan.pipeline_degree
    orders = [schedule.actions(p, degree, plan.micro_batches) for p in range(degree)]
    ends: dict[tuple[int, str, int], float] = {}

    def end_of(stage: int, place: int) -> float:
        action = orders[stage][place]
        key = (stage, str(action.kind), action.micro_batch)
        if key not in ends:
            before = end_of(stage, place - 1) if place else 0.0
            other = stage + (1 if action.kind == "backward" else -1)
            needed = end_of(other, orders[other].index(action)) if 0 <= other < degree else 0.0
            ends[key] = max(before, needed) + durations[action.kind][stage]
        return ends[key]

    last = [end_of(p, len(orders[p]) - 1) for p in range(degree)]
    once = [stage.time.sync_s + stage.time.optimizer_s for stage in plan.stages]
    return max(end + extra for end, extra in zip(last, once, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_timeline_is_what_the_schedule_does(schedule: str) -> None:
    plan = _pipeline(schedule)
    found = timeline(plan)
    assert found.end_s == pytest.approx(_simulated(plan))
    for number, (spans, stage) in enumerate(zip(found.stages, plan.stages, strict=True)):
        assert spans[0].start_s == 0
        assert spans[-1].end_s == pytest.approx(found.end_s)
        assert all(one.end_s == pytest.approx(other.start_s) for one, other in pairwise(spans))
        done = [(span.name, span.micro_batch) for span in spans if span.name in ("forward", "backward")]
        actions = schedule_named(schedule).actions(number, plan.pipeline_degree, plan.micro_batches)
        assert done == [(action.kind, action.micro_batch) for action in actions]
        busy = found.end_s - found.waiting_s(number)
        assert busy == pytest.approx(plan.micro_batches * stage.time_s, rel=1e-6)


def test_a_timeline_takes_what_the_plan_says() -> None:
    """The plan's formula spreads what is done once an iteration; both agree within the shares of the other stages."""
    plan = _pipeline()
    once = sum(stage.time.sync_s + stage.time.optimizer_s for stage in plan.stages)
    assert timeline(plan).end_s == pytest.approx(plan.iteration_s, rel=0.05, abs=once)
    alone = galvatron.plan("bert-large", "titan-rtx-8", memory="8GiB", batch=32, space="dp")
    assert timeline(alone).end_s == pytest.approx(alone.iteration_s, rel=1e-6)


def test_where_devices_share_cores_it_ends_when_the_plan_does() -> None:
    plan = plan_of(["dp2", "tp2"], ["sdp2", "dp2"], micro_batches=2)
    shared = replace(plan.cluster.facts, compute_contention=2.0)
    plan = replace(plan, cluster=replace(plan.cluster, facts=shared), iteration_s=plan.iteration_s / 1.5)
    found = timeline(plan)
    assert found.end_s == pytest.approx(plan.iteration_s)
    assert found.scaled < 1


def test_long_timelines_are_shortened_in_the_middle() -> None:
    whole = timeline(_pipeline())
    short = whole.shortened(64)
    for spans, all_spans in zip(short.stages, whole.stages, strict=True):
        assert len(spans) <= 2 * 8 + 1
        assert [span.name for span in spans].count("steady") == 1
        assert (spans[0], spans[-1]) == (all_spans[0], all_spans[-1])
        assert all(one.end_s == pytest.approx(other.start_s) for one, other in pairwise(spans))
    assert whole.shortened(10**6) == whole


def test_a_trace_has_the_timeline_of_each_rank(tmp_path: Path) -> None:
    plan = _pipeline()
    found = timeline(plan)
    write_trace(predicted_events(plan, found), tmp_path / "plan.trace.json")
    events = json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == [f"rank {rank} (stage {rank // 2}) predicted" for rank in range(8)]
    for process, name in names.items():
        own = [event for event in events if event["pid"] == process and event["ph"] == "X"]
        passes = [event for event in own if event["name"].startswith(("forward ", "backward "))]
        stage = int(name.split("stage ")[1].split(")")[0])
        assert len(passes) == 2 * plan.micro_batches
        work = plan.micro_batches * (plan.stages[stage].time_s - plan.stages[stage].time.transfer_s)
        once = plan.stages[stage].time.sync_s + plan.stages[stage].time.optimizer_s
        assert sum(event["dur"] for event in passes) / 1e6 == pytest.approx(work - once, rel=1e-6)
        assert max(event["ts"] + event["dur"] for event in own) / 1e6 <= found.end_s * (1 + 1e-9)
