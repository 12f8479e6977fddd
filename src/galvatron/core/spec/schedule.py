"""A schedule: the order in which the stages of a pipeline run their micro-batches, with what it needs and costs.

Planner and runtime ask the same object, so a new schedule is one more entry of :data:`SCHEDULES`. Knows nothing of
layers, links or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from galvatron.core.errors import InvalidInput

__all__ = ["GPIPE", "ONE_F_ONE_B", "SCHEDULES", "Action", "Pass", "Schedule", "schedule_named"]


class Pass(StrEnum):
    """The two ways through a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one chunk of a stage's layers."""

    kind: Pass
    micro_batch: int
    chunk: int = 0
    """Which of the stage's chunks of consecutive layers; 0 where it has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Facts of one schedule. Its functions take (stage, stages, micro-batches), and at least two stages."""

    name: str
    """As plan files and the command line have it."""
    title: str
    """As people write it."""
    help: str
    order: Callable[[int, int, int], Sequence[Action]]
    """What a stage does."""
    holds: Callable[[int, int, int], int]
    """Micro-batches of which a stage holds activations at its peak; a formula, because the search asks often. It must
    be the peak of ``order``, over all chunks, in whole micro-batches."""
    allows: Callable[[int, int], bool]
    """Whether it can run so many micro-batches on so many stages."""
    both_ways_at_once: bool
    """Whether activations and gradients cross a boundary at the same time, and so need channels of their own."""
    forwards_first: bool = False
    """Whether a stage runs all forwards before its first backward."""
    chunks: int = 1
    """Chunks of layers of each stage: a micro-batch passes all stages so many times each way."""
    bubble: float = 1.0
    """Its price: how long filling and draining the pipeline take, over one passage of a micro-batch through all stages
    but the slowest. With v chunks a stage, the first pass reaches the last stage after 1/v of that."""

    def actions(self, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        """What stage number ``stage`` does, in order. A single stage finishes each micro-batch before the next."""
        if stages == 1:
            return _run_ahead(1, micro_batches)
        return tuple(self.order(stage, stages, micro_batches))

    def in_flight(self, stage: int, stages: int, micro_batches: int) -> int:
        """Micro-batches whose activations a stage holds at its peak."""
        return 1 if stages == 1 else self.holds(stage, stages, micro_batches)

    def runs(self, stages: int, micro_batches: int) -> bool:
        """Whether so many micro-batches can be run; without a pipeline any number can."""
        return stages == 1 or self.allows(stages, micro_batches)

    def least_micro_batches(self, stages: int) -> int:
        return next(number for number in count(1) if self.runs(stages, number))


def _run_ahead(ahead: int, micro_batches: int) -> tuple[Action, ...]:
    """So many forwards, then backwards and forwards in turn, then the backwards that are left."""
    order = [Action(Pass.FORWARD, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Action(Pass.BACKWARD, number))
        if ahead + number < micro_batches:
            order.append(Action(Pass.FORWARD, ahead + number))
    return tuple(order)


def _gpipe(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    return _run_ahead(micro_batches, micro_batches)


def _any_number(stages: int, micro_batches: int) -> bool:
    return True


def _gpipe_holds(stage: int, stages: int, micro_batches: int) -> int:
    return micro_batches


GPIPE = Schedule(
    name="gpipe",
    title="GPipe",
    help="all forwards, then all backwards: every micro-batch's activations are alive at once",
    order=_gpipe,
    holds=_gpipe_holds,
    allows=_any_number,
    both_ways_at_once=False,
    forwards_first=True,
)


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    return _run_ahead(_one_f_one_b_holds(stage, stages, micro_batches), micro_batches)


def _one_f_one_b_holds(stage: int, stages: int, micro_batches: int) -> int:
    return min(micro_batches, stages - stage)


def _one_for_each_stage(stages: int, micro_batches: int) -> bool:
    return micro_batches >= stages


ONE_F_ONE_B = Schedule(
    name="1f1b",
    title="1F1B",
    help="backward as early as possible: a stage holds no more micro-batches than there are stages from it to the end",
    order=_one_f_one_b,
    holds=_one_f_one_b_holds,
    allows=_one_for_each_stage,
    both_ways_at_once=True,
)

SCHEDULES = (GPIPE, ONE_F_ONE_B)


def schedule_named(name: str) -> Schedule:
    """The schedule of this name."""
    for schedule in SCHEDULES:
        if schedule.name == name:
            return schedule
    known = ", ".join(schedule.name for schedule in SCHEDULES)
    raise InvalidInput(f"schedule: {name!r} is unknown; choose one of {known}")
