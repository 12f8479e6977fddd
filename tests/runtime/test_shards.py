"""Which part of a parameter each rank holds: together all of it, nothing twice, and put back where it was taken."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from galvatron.core.spec import Kind, Strategy
from galvatron.planner.space import Space, Switches
from galvatron.runtime.data_parallel.shards import ParameterShard, TensorSplit, part_of
from galvatron.runtime.layout.groups import Position, layer_groups, ranks_along


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64, 67])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_parts_are_those_of_fsdp(size: int, degree: int) -> None:
    """As ``torch.chunk`` cuts, which FSDP2 shards by; parts that it leaves out are empty."""
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(degree)]
    chunks += [[]] * (degree - len(chunks))
    assert [list(part_of(size, index, degree)) for index in range(degree)] == chunks


@pytest.mark.parametrize(("shape", "dim"), [((24, 8), 0), ((8, 24), 1), ((24,), 0), ((6, 24, 2), 1)])
@pytest.mark.parametrize(("degree", "parts", "shards"), [(2, 1, 1), (4, 1, 2), (2, 2, 3), (4, 3, 2), (1, 1, 5)])
def test_shards_are_put_back_where_they_were_taken(
    shape: tuple[int, ...], dim: int, degree: int, parts: int, shards: int
) -> None:
    """Every element is in one shard: split by TP along one dim, then by rows; so is each of its blocks."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    again, count = torch.full_like(whole, -1), 0
    for index, number in product(range(degree), range(shards)):
        split = TensorSplit(dim=dim, index=index, degree=degree, parts=parts)
        height = len(split.positions(shape[0])) if dim == 0 else shape[0]
        shard = ParameterShard(shape, (split,), part_of(height, number, shards))
        part = shard.take(whole)
        count += part.numel()
        shard.put(part, again)
        boxed = torch.full_like(part, -1)
        for block in shard.blocks():
            place = tuple(slice(start, start + size) for start, size in zip(block.offsets, block.sizes, strict=True))
            block.of(boxed).copy_(whole[place])
        assert torch.equal(boxed, part), "the shard's blocks are the same in the whole"
    assert count == whole.numel()
    assert torch.equal(again, whole)


@pytest.mark.parametrize(("experts", "degree", "parts", "shards"), [(2, 2, 2, 1), (4, 2, 1, 2), (2, 4, 2, 3)])
def test_experts_are_divided_along_two_dims(experts: int, degree: int, parts: int, shards: int) -> None:
    """By EP along the first dim, by TP along another, then by rows: every element is in one shard."""
    whole = torch.arange(8 * 16 * 3).view(8, 16, 3)
    again, count = torch.full_like(whole, -1), 0
    for place, index, number in product(range(experts), range(degree), range(shards)):
        splits = (
            TensorSplit(dim=0, index=place, degree=experts),
            TensorSplit(dim=1, index=index, degree=degree, parts=parts),
        )
        shard = ParameterShard((8, 16, 3), splits, part_of(8 // experts, number, shards))
        part = shard.take(whole)
        count += part.numel()
        shard.put(part, again)
        assert all(torch.equal(block.of(part), block.in_whole(whole)) for block in shard.blocks())
    assert count == whole.numel()
    assert torch.equal(again, whole)


def test_fused_weights_are_cut_one_by_one() -> None:
    """Of query, key and value side by side, each rank has its heads of all three."""
    positions = TensorSplit(dim=0, index=1, degree=2, parts=3).positions(12)
    assert positions.tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize(
    ("text", "dispatch", "slices", "tensor", "data"),
    [
        ("sdp8/dp2-ep4", (0, 1, 2, 3), (0,), (0,), (0, 4)),
        ("dp4-tp2/ep4-tp2", (0, 2, 4, 6), (0,), (0, 1), (0,)),
        ("dp2-tp4/ep4-tp2", (0, 2, 4, 6), (0, 2), (0, 1), (0,)),
        ("dp2-tp4/ep2-dp4", (0, 4), (0, 1, 2, 3), (0,), (0, 1, 2, 3)),
        ("tp8", (0,), (0,), tuple(range(8)), (0,)),
    ],
)
def test_groups_of_experts(
    text: str, dispatch: tuple[int, ...], slices: tuple[int, ...], tensor: tuple[int, ...], data: tuple[int, ...]
) -> None:
    """Those of rank 0: who has all experts together, divides the same tokens, splits or replicates the same experts."""
    found = layer_groups(Position(range(8), 0), Strategy.parse(text))
    assert found.dispatch.ranks == dispatch
    assert found.token_slices.ranks == slices
    assert (found.expert_tensor.ranks, found.expert_data.ranks) == (tensor, data)


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12])
def test_groups_differ_in_their_digits_alone(devices: int) -> None:
    """For each kind of each strategy: groups of the axis's degree that divide the stage, whatever its first rank is."""
    ranks = range(100, 100 + devices)
    for strategy in Space(name="full", title="", switches=Switches(hybrid_sharding=True)).strategies(devices):
        for kind in Kind:
            factors = strategy.factors(kind)
            groups = list(dict.fromkeys(ranks_along(Position(ranks, rank), factors) for rank in ranks))
            assert sorted(rank for group in groups for rank in group) == list(ranks)
            assert {len(group) for group in groups} == {strategy.degree(kind)}
            others = strategy.factors(*Kind) - factors
            for group in groups:
                assert list(group) == sorted(group)
                for rank in group:
                    assert ranks_along(Position(ranks, rank), factors) == group
                    for factor in others:
                        values = {(member - 100) // factor.stride % factor.size for member in group}
                        assert len(values) == 1
