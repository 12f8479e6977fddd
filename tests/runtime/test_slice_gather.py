"""Slice-Gather on real ranks: every rank ends with its rows and tokens, and receives no byte more than was charged."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from holdings import flat_cluster, forms, part
from ranks import ranks
from traffic import Traffic

from galvatron.cost.slice_gather import form_rates
from galvatron.runtime.forms import FormChange
from galvatron.runtime.groups import GroupKey, GroupPool, Position, partition
from galvatron.runtime.layout import Grid
from galvatron.spec import Form

_FEATURES = 3
_ELEMENT = 8


@dataclass(frozen=True)
class _Job:
    """Changes to make between forms, and the forms of the layers of the stage that make up the grid."""

    pairs: list[tuple[Form, Form]]
    rows: int
    tokens: int
    stage: list[Form] | None = None
    """None: each pair is a stage of its own."""

    def grid(self, source: Form, target: Form) -> Grid:
        return Grid([form.rows for form in self.stage or (source, target)], self.rows)


@dataclass(frozen=True)
class _Outcome:
    fits: bool
    values: bool
    gradients: bool
    forward_volume: float
    backward_volume: float


def _change(job: _Job) -> list[_Outcome]:
    """On a rank: make all the changes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    position = Position(range(world), rank)
    whole = torch.arange(job.rows * job.tokens * _FEATURES, dtype=torch.float64).view(job.rows, job.tokens, _FEATURES)
    gradient = whole.flip(0) * 7
    grids = [job.grid(source, target) for source, target in job.pairs]
    pool = GroupPool(
        GroupKey(group)
        for grid, (a, b) in zip(grids, job.pairs, strict=True)
        for digits in (grid.gathered(a.rows, b.rows), grid.gathered(b.rows, a.rows), a.sequence, b.sequence)
        for group in partition(range(world), digits)
    )
    outcomes = []
    for grid, (source, target) in zip(grids, job.pairs, strict=True):
        change = FormChange(pool, position, grid, source, target)
        given = part(rank, whole, source, grid).requires_grad_()
        with Traffic() as forward:
            (changed,) = change((given,))
        with Traffic() as backward:
            torch.autograd.backward(changed, part(rank, gradient, target, grid))
        assert given.grad is not None
        outcomes.append(
            _Outcome(
                grid.fits,
                torch.equal(changed, part(rank, whole, target, grid)),
                torch.equal(given.grad, part(rank, gradient, source, grid)),
                forward.volume,
                backward.volume,
            )
        )
    return outcomes


def _run(devices: int, job: _Job) -> list[_Outcome]:
    """The outcome of each pair, the same on every rank and right on all of them."""
    found: list[list[_Outcome]] = ranks(devices).run(_change, job)
    wrong = [
        (rank, source, target)
        for rank, outcomes in enumerate(found)
        for (source, target), outcome in zip(job.pairs, outcomes, strict=True)
        if not (outcome.values and outcome.gradients)
    ]
    assert wrong == []
    assert all(outcomes == found[0] for outcomes in found), "every rank receives as much as the others"
    return found[0]


def _charged(devices: int, pairs: list[tuple[Form, Form]], size: int) -> list[float]:
    """What the planner charges for forward and backward of each pair, in bytes."""
    used = list(dict.fromkeys(form for pair in pairs for form in pair))
    per_byte, _ = form_rates(used, flat_cluster(devices))
    return [float(per_byte[used.index(source), used.index(target)]) * size for source, target in pairs]


@pytest.mark.parametrize("devices", [4, 8])
def test_all_pairs_of_forms_in_one_stage(devices: int) -> None:
    """Each digit has an axis of its own: the volume is exactly what the planner charges."""
    every = forms(devices)
    pairs = list(product(every, every))
    outcomes = _run(devices, _Job(pairs, rows=2 * devices, tokens=devices, stage=every))
    assert all(outcome.fits for outcome in outcomes)
    found = [outcome.forward_volume + outcome.backward_volume for outcome in outcomes]
    assert found == pytest.approx(_charged(devices, pairs, 2 * devices * devices * _FEATURES * _ELEMENT))


@pytest.mark.parametrize("devices", [4, 8])
def test_rows_that_are_only_sliced_send_nothing(devices: int) -> None:
    """Forward from coarser to finer rows, and backward of the other way round; all else moves something."""
    layouts = list(dict.fromkeys(form.rows for form in forms(devices)))
    pairs = [(Form(a), Form(b)) for a, b in product(layouts, repeat=2)]
    outcomes = _run(devices, _Job(pairs, rows=devices, tokens=1, stage=[Form(layout) for layout in layouts]))
    for (source, target), outcome in zip(pairs, outcomes, strict=True):
        assert (outcome.forward_volume == 0) == (source.rows <= target.rows)
        assert (outcome.backward_volume == 0) == (target.rows <= source.rows)


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_all_pairs_of_layouts_as_stages_of_their_own(devices: int) -> None:
    """Axes are just those of the two layouts. On 6 devices some pairs write ranks in two radices and are gathered
    whole; the planner charges that too."""
    layouts = list(dict.fromkeys(form.rows for form in forms(devices)))
    pairs = [(Form(a), Form(b)) for a, b in product(layouts, repeat=2)]
    outcomes = _run(devices, _Job(pairs, rows=36 if devices == 6 else 2 * devices, tokens=1))
    assert all(outcome.fits for outcome in outcomes) == (devices != 6)
    found = [outcome.forward_volume + outcome.backward_volume for outcome in outcomes]
    rows = 36 if devices == 6 else 2 * devices
    assert found == pytest.approx(_charged(devices, pairs, rows * _FEATURES * _ELEMENT))


@pytest.mark.parametrize(("devices", "rows"), [(4, 2), (8, 4)])
def test_too_few_rows_for_an_axis_a_digit(devices: int, rows: int) -> None:
    """Layouts are plain chunks then, and a change gathers the source whole: (g − 1)/g of the rows, g its parts."""
    layouts = [layout for layout in dict.fromkeys(form.rows for form in forms(devices)) if 2 ** len(layout) <= rows]
    pairs = [(Form(a), Form(b)) for a, b in product(layouts, repeat=2)]
    outcomes = _run(devices, _Job(pairs, rows=rows, tokens=1, stage=[Form(layout) for layout in layouts]))
    assert not any(outcome.fits for outcome in outcomes)
    size = rows * _FEATURES * _ELEMENT
    for (source, target), outcome in zip(pairs, outcomes, strict=True):
        parts = [1 if source == target else prod(digit.radix for digit in form.rows) for form in (source, target)]
        assert outcome.forward_volume == pytest.approx(size * (parts[0] - 1) / parts[0])
        assert outcome.backward_volume == pytest.approx(size * (parts[1] - 1) / parts[1])
