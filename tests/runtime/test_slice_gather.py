"""Slice-Gather on real ranks: every rank ends with its rows and tokens, and receives no byte more than was charged."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from holdings import changed_rows, first_rows, flat_cluster, layouts, part
from longer import longer
from ranks import ranks
from traffic import Traffic

from galvatron.core.spec import Layout, factor_by_factor, gathered_factors
from galvatron.planner.cost.slice_gather import layout_rates
from galvatron.runtime.layout.groups import GroupKey, GroupPool, Position, ranks_along
from galvatron.runtime.layout.slice_gather import LayoutChange, RowAssignments

_FEATURES = 3
_ELEMENT = 8


@dataclass(frozen=True)
class _Job:
    """The layouts of a stage's layers, for several stages."""

    stages: list[list[Layout]]
    rows: int
    tokens: int

    @property
    def size(self) -> int:
        return self.rows * self.tokens * _FEATURES * _ELEMENT


@dataclass(frozen=True)
class _Outcome:
    """Of one change."""

    values: bool
    gradients: bool
    alone: bool
    """No more is kept alive than the result."""
    forward_volume: float
    backward_volume: float

    @property
    def volume(self) -> float:
        return self.forward_volume + self.backward_volume


def _change(job: _Job) -> list[_Outcome]:
    """On a rank: make all the changes of all the stages."""
    world = dist.get_world_size()
    needed = (
        GroupKey(group)
        for stage in job.stages
        for a, b in pairwise(stage)
        for factors in (
            gathered_factors(a.rows, b.rows, job.rows),
            gathered_factors(b.rows, a.rows, job.rows),
            a.sequence,
            b.sequence,
        )
        for group in (ranks_along(Position(range(world), rank), factors) for rank in range(world))
    )
    pool = GroupPool(needed, torch.device("cpu"))
    return [outcome for stage in job.stages for outcome in _stage(job, stage, pool)]


def _stage(job: _Job, stage: list[Layout], pool: GroupPool) -> list[_Outcome]:
    rank, world = dist.get_rank(), dist.get_world_size()
    position = Position(range(world), rank)
    whole = torch.arange(job.rows * job.tokens * _FEATURES, dtype=torch.float64).view(job.rows, job.tokens, _FEATURES)
    gradient = whole.flip(0) * 7
    held = first_rows(world, stage[0].rows, job.rows)
    assignments = RowAssignments([layout.rows for layout in stage], job.rows)
    outcomes = []
    for number, (source, target) in enumerate(pairwise(stage)):
        after = changed_rows(held, source.rows, target.rows)
        change = LayoutChange(pool, position, job.rows, source, target)
        given = part(rank, whole, held[rank], source.sequence).clone().requires_grad_()
        with Traffic() as forward:
            (changed,) = change((given,))
        with Traffic() as backward:
            torch.autograd.backward(changed, part(rank, gradient, after[rank], target.sequence))
        assert given.grad is not None
        said = [list(assignments.at[number + 1].numbers(index)) for index in range(world)]
        outcomes.append(
            _Outcome(
                said == after and torch.equal(changed, part(rank, whole, after[rank], target.sequence)),
                torch.equal(given.grad, part(rank, gradient, held[rank], source.sequence)),
                changed.untyped_storage().nbytes() == changed.nbytes,
                forward.volume,
                backward.volume,
            )
        )
        held = after
    return outcomes


def _run(devices: int, job: _Job) -> list[_Outcome]:
    """The outcome of each change, the same on every rank and right on all of them."""
    found: list[list[_Outcome]] = ranks(devices).run(_change, job)
    pairs = [pair for stage in job.stages for pair in pairwise(stage)]
    wrong = [
        (rank, source, target)
        for rank, outcomes in enumerate(found)
        for (source, target), outcome in zip(pairs, outcomes, strict=True)
        if not (outcome.values and outcome.gradients and outcome.alone)
    ]
    assert wrong == []
    assert all(outcomes == found[0] for outcomes in found), "every rank receives as much as the others"
    return found[0]


def _charged(devices: int, job: _Job) -> list[float]:
    """What the planner charges for forward and backward of each change, in bytes."""
    used = list(dict.fromkeys(layout for stage in job.stages for layout in stage))
    charges = layout_rates(used, flat_cluster(devices)).change_s(job.rows, torch.tensor(float(job.size)).numpy())
    return [float(charges[used.index(a), used.index(b)]) for stage in job.stages for a, b in pairwise(stage)]


def _pairs(every: list[Layout]) -> list[list[Layout]]:
    return [list(pair) for pair in product(every, repeat=2)]


def _layouts(devices: int, rows: int) -> list[Layout]:
    """Forms without sequences, of as many parts as divide the rows."""
    every = dict.fromkeys(Layout(layout.rows) for layout in layouts(devices))
    return [layout for layout in every if rows % layout.parts == 0]


@pytest.mark.parametrize("devices", [4, 6, longer(8)])
def test_all_pairs_of_forms(devices: int) -> None:
    """The volume is exactly what the planner charges. On 6 devices some pairs write ranks in two radices, and are
    gathered whole; the planner charges that too."""
    job = _Job(_pairs(layouts(devices)), rows=2 * devices, tokens=devices)
    found = [outcome.volume for outcome in _run(devices, job)]
    assert found == pytest.approx(_charged(devices, job))


@pytest.mark.parametrize("devices", [4, longer(8)])
def test_rows_that_are_only_sliced_send_nothing(devices: int) -> None:
    """Forward from coarser to finer rows, and backward of the other way round; all else moves something."""
    pairs = _pairs(_layouts(devices, devices))
    for (source, target), outcome in zip(pairs, _run(devices, _Job(pairs, rows=devices, tokens=1)), strict=True):
        assert (outcome.forward_volume == 0) == (source.rows <= target.rows)
        assert (outcome.backward_volume == 0) == (target.rows <= source.rows)


@pytest.mark.parametrize(("devices", "rows"), [(4, 2), longer(8, 2), longer(8, 4), (6, 2), longer(6, 3)])
def test_too_few_rows_for_both_layouts(devices: int, rows: int) -> None:
    """Where the rows do not divide by the factors of both, a change gathers the source whole, and the planner charges
    that; layouts that contain each other need no more rows than they have parts."""
    pairs = _pairs(_layouts(devices, rows))
    job = _Job(pairs, rows=rows, tokens=1)
    outcomes = _run(devices, job)
    assert [outcome.volume for outcome in outcomes] == pytest.approx(_charged(devices, job))
    whole = [not factor_by_factor(source.rows, target.rows, rows) for source, target in pairs]
    assert any(whole)
    for (source, target), outcome, gathered in zip(pairs, outcomes, whole, strict=True):
        if gathered:
            assert outcome.forward_volume == pytest.approx(job.size * (source.parts - 1) / source.parts)
        if source.rows <= target.rows:
            assert outcome.forward_volume == 0


@pytest.mark.parametrize("devices", [4, longer(8)])
def test_one_sample(devices: int) -> None:
    """Parts of its sequence are contiguous where they lie, and yet must not keep the whole of it alive."""
    pairs = _pairs([layout for layout in layouts(devices) if not layout.rows])
    assert any(source.sequence < target.sequence for source, target in pairs)
    job = _Job(pairs, rows=1, tokens=devices)
    assert [outcome.volume for outcome in _run(devices, job)] == pytest.approx(_charged(devices, job))


@pytest.mark.parametrize(
    ("devices", "rows"), [(4, 2), longer(4, 8), (6, 6), longer(6, 12), longer(8, 4), longer(8, 16)]
)
def test_each_change_of_a_stage_costs_what_it_would_alone(devices: int, rows: int) -> None:
    """Ten layers in random layouts: however mixed they are, each pair of neighbours sends what it is charged."""
    rng = random.Random(devices * rows)
    every = [layout for layout in layouts(devices) if rows % layout.parts == 0]
    job = _Job([[rng.choice(every) for _ in range(10)] for _ in range(6)], rows=rows, tokens=devices)
    found = [outcome.volume for outcome in _run(devices, job)]
    assert found == pytest.approx(_charged(devices, job))
