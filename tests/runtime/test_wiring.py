"""Groups between stages: messages of one group wait for each other in NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import GPIPE, ONE_F_ONE_B, SCHEDULES, Schedule, Strategy
from galvatron.families.layer import Tie, Use
from galvatron.runtime.checks import check_schedule
from galvatron.runtime.layout.groups import StagePlan, backward_group, forward_group, needed_groups


def _stages(count: int, width: int = 2) -> list[StagePlan]:
    return [
        StagePlan(ranks=tuple(range(width * number, width * (number + 1))), first=number, strategies=(Strategy(),))
        for number in range(count)
    ]


@pytest.mark.parametrize("count", range(2, 10))
def test_a_stage_sends_on_while_it_receives(count: int) -> None:
    stages = _stages(count)
    groups = [forward_group(stages, boundary) for boundary in range(count - 1)]
    for boundary, group in enumerate(groups):
        assert {*stages[boundary].ranks, *stages[boundary + 1].ranks} <= set(group.ranks)
        assert group not in groups[boundary + 1 : boundary + 2]
    assert len(set(groups)) == min(count - 1, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_have_channels_of_their_own_where_activations_travel_beside_them(schedule: Schedule) -> None:
    stages = _stages(4)
    apart = [forward_group(stages, first) != backward_group(stages, first, schedule) for first in range(3)]
    assert apart == [schedule is not GPIPE] * 3
    between = {group for group in needed_groups(stages, 4, (), schedule) if len(group.ranks) > 2}
    assert len(between) == (2 if schedule is GPIPE else 4)


def test_chunks_of_layers_are_refused_by_the_name_of_their_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage runs as one: another chunk's passes would run the same layers again."""
    chunked = replace(ONE_F_ONE_B, name="chunked", title="Chunked 1F1B", chunks=2)
    monkeypatch.setattr("galvatron.core.spec.schedule.SCHEDULES", (*SCHEDULES, chunked))
    plan = galvatron.plan("bert-tiny", "cpu-4", batch=16, space="pp", schedule="chunked")
    assert plan.pipeline_degree > 1
    with pytest.raises(InvalidInput, match=r"schedule: Chunked 1F1B \('chunked'\) cuts each stage into 2 chunks"):
        check_schedule(plan)
    check_schedule(replace(plan, schedule="1f1b"))


@pytest.mark.parametrize("small", [False, True])
def test_a_tied_weight_takes_a_group_only_of_stages_that_use_it(small: bool) -> None:
    """The profiler has stages of one layer, which may be none of those that share a table of positions."""
    tie = Tie(uses=(Use(layer=1, name="bias.weight"), Use(layer=2, name="bias.weight")), small=small)
    unconcerned, first, second = _stages(3)
    assert () not in [group.ranks for group in needed_groups([unconcerned], 4, [tie], GPIPE)]
    assert (2, 3, 4, 5) in [group.ranks for group in needed_groups([first, second], 4, [tie], GPIPE)]
    alone = [group.ranks for group in needed_groups([unconcerned, first], 4, [tie], GPIPE)]
    assert ((2, 3) in alone) is small  # each rank has a small one whole, and its gradient is summed
