"""Between stages: each rank receives its rows and tokens, straight from ranks that hold them, and not a byte more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from holdings import changed_rows, first_rows, flat_cluster, layouts, part
from longer import longer
from ranks import ranks
from torch import Tensor
from traffic import Traffic

from galvatron.core.spec import LayerSpec, Layout, ModelSpec, Training
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.space import Space, Switches
from galvatron.runtime.layout.slice_gather import RowAssignments
from galvatron.runtime.pipeline.transfer import StageEnd, StageTransfer

_FEATURES = 3


@dataclass(frozen=True)
class _Stage:
    """One end: how its ranks hold the activation, which has come there through another layout."""

    layout: Layout
    before: Layout

    def side(self, ranks: range, rows: int) -> StageEnd:
        assignments = RowAssignments([self.before.rows, self.layout.rows], rows)
        return StageEnd(ranks=tuple(ranks), layout=self.layout, assignment=assignments.at[-1])

    def part(self, index: int, devices: int, whole: Tensor) -> Tensor:
        """What a rank must hold."""
        held = first_rows(devices, self.before.rows, len(whole))
        held = changed_rows(held, self.before.rows, self.layout.rows)
        return part(index, whole, held[index], self.layout.sequence)


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
        here, there = source.side(range(half), rows), target.side(range(half, world), rows)
        transfer = StageTransfer(here, there, rank, group)
        right = True
        with Traffic() as traffic:
            if rank < half:
                held = [source.part(rank, half, whole) for whole in wholes]
                for work, _ in transfer.send(held):
                    work.wait()
            else:
                wanted = [target.part(rank - half, half, whole) for whole in wholes]
                found = [torch.full_like(tensor, torch.nan) for tensor in wanted]
                transfer.receive(found)
                right = all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
        received, sent = (sum(one.size for one in traffic.of(what)) for what in ("receive", "send"))
        outcomes.append(_Outcome(right, received, sent))
    return outcomes


def _charged(devices: int, rows: int, tokens: int) -> dict[Layout, float]:
    """What the planner says a rank of each layout receives, in bytes."""
    boundary = tokens * _FEATURES * 8
    layer = LayerSpec(name="layer", parameters=1, forward_flops=1, split_activation_bytes=1, boundary_bytes=boundary)
    model = ModelSpec(name="model", family="custom", layers=(layer,), training=Training())
    switches = Switches(hybrid_sharding=True, sequence_parallel=True)
    strategies = Space(name="full", title="", switches=switches).strategies(devices)
    costs = CostModel(model=model, cluster=flat_cluster(2 * devices), conventions=GALVATRON).stage(strategies, 2)
    nanoseconds = costs.transfer_ns(rows)[0]
    return {layout: float(nanoseconds[number]) / 1e9 for number, layout in enumerate(costs.layouts)}


def _check(devices: int, pairs: list[tuple[_Stage, _Stage]], rows: int) -> list[list[_Outcome]]:
    found: list[list[_Outcome]] = ranks(2 * devices).run(_cross, pairs, rows)
    charged = _charged(devices, rows, 3 * devices)
    for number, (source, target) in enumerate(pairs):
        for rank, outcomes in enumerate(found):
            assert outcomes[number].right, (rank, source, target)
            expected = 0 if rank < devices else charged[target.layout]
            assert outcomes[number].received == expected, (rank, source, target)
        assert sum(one[number].sent for one in found) == sum(one[number].received for one in found)
    return found


@pytest.mark.parametrize("devices", [2, longer(4)])
def test_all_pairs_of_forms(devices: int) -> None:
    stages = [_Stage(layout, layout) for layout in layouts(devices)]
    _check(devices, list(product(stages, stages)), 2 * devices)


@pytest.mark.parametrize("step", [5, longer(1)])
def test_rows_in_another_order(step: int) -> None:
    """In one of the stages rows lie as a change of layout has left them; of all pairs each fifth, or every one."""
    every = layouts(4)
    plain = [_Stage(layout, layout) for layout in every]
    mixed = [_Stage(layout, before) for layout, before in product(every, repeat=2) if layout.rows != before.rows]
    orders = [stage.side(range(4), 8).assignment.order for stage in mixed]
    stages = [stage for stage, order in zip(mixed, orders, strict=True) if order != tuple(range(8))]
    assert stages
    pairs = [*product(plain, stages), *product(stages, plain)]
    assert len(pairs) % 5, "a multiple would leave out the same ones"
    _check(4, pairs[::step], 8)


def test_fewer_rows_than_devices() -> None:
    every = [layout for layout in layouts(4) if len(layout.rows) < 2]
    stages = [_Stage(layout, before) for layout, before in product(every, repeat=2)]
    _check(4, list(product(stages, stages))[::13], 2)  # 13 shares no factor with the number of pairs


def test_stages_of_three() -> None:
    stages = [_Stage(layout, layout) for layout in layouts(3)]
    _check(3, list(product(stages, stages)), 6)


def test_copies_share_the_work_of_sending() -> None:
    """From tensor-parallel ranks that all hold everything, each sends its part to its counterpart."""
    every = layouts(4)
    copies = next(layout for layout in every if layout.parts == 1)
    stages = [(_Stage(copies, copies), _Stage(layout, layout)) for layout in every]
    for outcomes in zip(*_check(4, stages, 8)[:4], strict=True):
        assert len({outcome.sent for outcome in outcomes}) == 1
