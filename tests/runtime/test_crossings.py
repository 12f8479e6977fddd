"""Between stages: each rank receives its rows and tokens, straight from ranks that hold them, and not a byte more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from holdings import flat_cluster, forms, part
from ranks import ranks
from traffic import Traffic

from galvatron.cost import GALVATRON, CostModel
from galvatron.runtime.layout import Grid
from galvatron.runtime.transfer import Crossing, Side
from galvatron.space import Space, Switches
from galvatron.spec import Form, LayerSpec, ModelSpec, Training

_FEATURES = 3


@dataclass(frozen=True)
class _Stage:
    """One end: how its ranks hold the activation, and the forms of all its layers."""

    form: Form
    layers: tuple[Form, ...]

    def grid(self, rows: int) -> Grid:
        return Grid([form.rows for form in self.layers], rows)


@dataclass(frozen=True)
class _Outcome:
    right: bool
    received: int
    sent: int


def _cross(pairs: list[tuple[_Stage, _Stage]], rows: int) -> list[_Outcome]:
    """On a rank: the first half of the ranks sends to the second; two tensors, as in an encoder-decoder model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    half = world // 2
    group = dist.new_group(list(range(world)))
    wholes = [
        torch.arange(rows * tokens * _FEATURES, dtype=torch.float64).view(rows, tokens, _FEATURES) * (tokens - 7)
        for tokens in (half, 2 * half)
    ]
    outcomes = []
    for source, target in pairs:
        here = Side(ranks=tuple(range(half)), form=source.form, grid=source.grid(rows))
        there = Side(ranks=tuple(range(half, world)), form=target.form, grid=target.grid(rows))
        crossing = Crossing(here, there, rank, group)
        right = True
        with Traffic() as traffic:
            if rank < half:
                held = [part(rank, whole, source.form, here.grid) for whole in wholes]
                for work, _ in crossing.send(held):
                    work.wait()
            else:
                wanted = [part(rank - half, whole, target.form, there.grid) for whole in wholes]
                found = [torch.full_like(tensor, torch.nan) for tensor in wanted]
                crossing.receive(found)
                right = all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
        received, sent = (sum(one.size for one in traffic.of(what)) for what in ("receive", "send"))
        outcomes.append(_Outcome(right, received, sent))
    return outcomes


def _charged(devices: int, rows: int, tokens: int) -> dict[Form, float]:
    """What the planner says a rank of each form receives, in bytes."""
    boundary = tokens * _FEATURES * 8
    layer = LayerSpec(name="layer", parameters=1, forward_flops=1, split_activation_bytes=1, boundary_bytes=boundary)
    model = ModelSpec(name="model", family="custom", layers=(layer,), training=Training())
    switches = Switches(hybrid_sharding=True, sequence_parallel=True)
    strategies = Space(name="full", title="", switches=switches).strategies(devices)
    costs = CostModel(model=model, cluster=flat_cluster(2 * devices), conventions=GALVATRON).stage(strategies, 2)
    nanoseconds = costs.transfer_ns(rows)[0]
    return {form: float(nanoseconds[number]) / 1e9 for number, form in enumerate(costs.layouts)}


def _check(devices: int, pairs: list[tuple[_Stage, _Stage]], rows: int) -> list[list[_Outcome]]:
    found: list[list[_Outcome]] = ranks(2 * devices).run(_cross, pairs, rows)
    charged = _charged(devices, rows, 3 * devices)
    for number, (source, target) in enumerate(pairs):
        for rank, outcomes in enumerate(found):
            assert outcomes[number].right, (rank, source, target)
            expected = 0 if rank < devices else charged[target.form]
            assert outcomes[number].received == expected, (rank, source, target)
        assert sum(one[number].sent for one in found) == sum(one[number].received for one in found)
    return found


@pytest.mark.parametrize("devices", [2, 4])
def test_all_pairs_of_forms(devices: int) -> None:
    """Both stages number rows by all digits of their ranks."""
    every = forms(devices)
    stages = [_Stage(form, tuple(every)) for form in every]
    _check(devices, list(product(stages, stages)), 2 * devices)


def test_stages_that_number_rows_differently() -> None:
    """One stage has axes for its one layout, the other for all digits."""
    every = forms(4)
    alone = [_Stage(form, (form,)) for form in every]
    mixed = [_Stage(form, tuple(every)) for form in every]
    _check(4, [*product(alone, mixed), *product(mixed, alone)], 8)


def test_too_few_rows_for_an_axis_a_digit() -> None:
    every = [form for form in forms(4) if len(form.rows) < 2]
    stages = [_Stage(form, tuple(every)) for form in every]
    assert not stages[0].grid(2).fits
    _check(4, list(product(stages, stages)), 2)


def test_stages_of_three() -> None:
    every = forms(3)
    stages = [_Stage(form, tuple(every)) for form in every]
    _check(3, list(product(stages, stages)), 6)


def test_copies_share_the_work_of_sending() -> None:
    """From tensor-parallel ranks that all hold everything, each sends its part to its counterpart."""
    every = forms(4)
    copies = next(form for form in every if form.parts == 1)
    stages = [(_Stage(copies, tuple(every)), _Stage(form, tuple(every))) for form in every]
    for outcomes in zip(*_check(4, stages, 8)[:4], strict=True):
        assert len({outcome.sent for outcome in outcomes}) == 1
