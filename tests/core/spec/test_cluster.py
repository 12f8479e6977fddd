"""What groups of devices get from the links they span: by hand, and against a count of who is where."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import (
    Cluster,
    Collective,
    Device,
    Factor,
    Factors,
    Kind,
    Level,
    Link,
    MeasuredGroup,
    Precision,
    Strategy,
    prime_factors,
)

FAST, SLOW = 100.0, 10.0


def cluster(*levels: tuple[int, float, bool], transfer: float | None = None) -> Cluster:
    """A cluster from (units, bandwidth, shared), innermost first; level i has a latency of i + 1."""
    return Cluster(
        name="test",
        device=Device(name="device", memory_bytes=2**30, memory_bytes_per_s=1e9, fp32_flops_per_s=1e9),
        levels=tuple(
            Level(
                name=str(index),
                units=units,
                bytes_per_s=bytes_per_s,
                latency_s=index + 1.0,
                transfer_bytes_per_s=transfer,
                shared=shared,
            )
            for index, (units, bytes_per_s, shared) in enumerate(levels)
        ),
        reserved_bytes=0,
    )


def link(cluster: Cluster, strategy: str, kind: Kind) -> tuple[float, float]:
    found = cluster.link(Strategy.parse(strategy).factors(kind))
    return found.bytes_per_s, found.latency_s


TWO_NODES_SHARED = cluster((8, FAST, False), (2, SLOW, True))
TWO_NODES_RAILS = cluster((8, FAST, False), (2, SLOW, False))


@pytest.mark.parametrize(
    ("strategy", "kind", "shared", "lanes"),
    [
        # TP on 8 neighbours stays inside a node.
        ("dp2-tp8", Kind.TP, FAST, FAST),
        # Eight DP pairs {i, i + 8} leave each node at once: an eighth of a shared link, a whole lane.
        ("dp2-tp8", Kind.DP, SLOW / 8, SLOW),
        # The same degrees the other way round: TP {0, 2, …, 14} has 4 of a node's 8 devices, DP {0, 1} is inside.
        ("tp8-dp2", Kind.TP, SLOW * 4 / 8, 4 * SLOW),
        ("tp8-dp2", Kind.DP, FAST, FAST),
        # One ring over everything has the shared link to itself, or all eight lanes.
        ("sdp16", Kind.SDP, SLOW, 8 * SLOW),
        # DP {0, 4, 8, 12}: two of each node's eight.
        ("dp4-tp4", Kind.DP, SLOW * 2 / 8, 2 * SLOW),
        # DP {0, 8} outside, TP in the middle {0, 2, 4, 6}, SDP {0, 1} inside.
        ("dp2-tp4-sdp2", Kind.TP, FAST, FAST),
        ("dp2-tp4-sdp2", Kind.SDP, FAST, FAST),
    ],
)
def test_groups_on_two_nodes_of_eight(strategy: str, kind: Kind, shared: float, lanes: float) -> None:
    assert link(TWO_NODES_SHARED, strategy, kind)[0] == shared
    assert link(TWO_NODES_RAILS, strategy, kind)[0] == lanes


@pytest.mark.parametrize(
    ("strategy", "kind", "steps"),
    [
        ("dp2-tp8", Kind.TP, 3 * 1.0),  # a tree over the 8 of a node
        ("dp2-tp8", Kind.DP, 1 * 2.0),  # one hop to the other node
        ("sdp16", Kind.SDP, 3 * 1.0 + 1 * 2.0),
        ("tp8-dp2", Kind.TP, 2 * 1.0 + 1 * 2.0),  # 4 in each node, 2 nodes
    ],
)
def test_a_pass_over_a_group_takes_a_tree_inside_and_a_ring_between(strategy: str, kind: Kind, steps: float) -> None:
    assert link(TWO_NODES_SHARED, strategy, kind)[1] == steps


def test_a_ring_passes_every_node() -> None:
    """128 nodes are 127 hops, not 7: what makes sharding over a thousand devices slow."""
    assert link(cluster((8, FAST, False), (128, SLOW, False)), "sdp1024", Kind.SDP)[1] == 3 * 1.0 + 127 * 2.0


def test_lanes_cannot_outrun_the_links_inside_a_node() -> None:
    quick_rails = cluster((8, FAST, False), (2, 50.0, False))
    assert link(quick_rails, "sdp16", Kind.SDP)[0] == FAST  # not 8 × 50
    assert link(quick_rails, "dp2-tp8", Kind.DP)[0] == 50.0


@pytest.mark.parametrize(
    ("strategy", "kind", "bytes_per_s"),
    [
        ("dp2-tp3", Kind.TP, FAST),  # {0, 1, 2} is a node
        ("dp2-tp3", Kind.DP, SLOW / 3),  # {0, 3}, {1, 4}, {2, 5} leave each node together
    ],
)
def test_six_devices_in_two_nodes_of_three(strategy: str, kind: Kind, bytes_per_s: float) -> None:
    assert link(cluster((3, FAST, False), (2, SLOW, True)), strategy, kind)[0] == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    ("strategy", "kind", "bytes_per_s"),
    [
        ("dp3-tp8", Kind.TP, FAST),
        ("dp3-tp8", Kind.DP, SLOW / 8),  # {0, 8, 16}
        ("dp6-tp4", Kind.DP, SLOW * 2 / 8),  # {0, 4, 8, 12, 16, 20}: two a node
        ("sdp24", Kind.SDP, SLOW),
        ("sdp12-tp2", Kind.SDP, SLOW * 4 / 8),
    ],
)
def test_twenty_four_devices_in_three_nodes_of_eight(strategy: str, kind: Kind, bytes_per_s: float) -> None:
    assert link(cluster((8, FAST, False), (3, SLOW, True)), strategy, kind)[0] == pytest.approx(bytes_per_s)


def test_a_tree_of_shared_uplinks_is_as_slow_as_its_narrowest_crossing() -> None:
    tree = cluster((2, 4.0, False), (2, 6.0, True), (2, 5.0, True))
    assert link(tree, "dp4-tp2", Kind.TP)[0] == 4.0  # pairs
    assert link(tree, "dp2-tp4", Kind.TP)[0] == 4.0  # a quad fills its uplink: 6, but the lanes give 4
    assert link(tree, "dp2-tp4", Kind.DP)[0] == 5.0 / 4  # {i, i + 4}: four of them leave a quad
    assert link(tree, "dp2-tp2-sdp2", Kind.TP)[0] == 3.0  # {0, 2}, {1, 3}: two leave a pair
    assert link(tree, "sdp8", Kind.SDP) == (4.0, 1.0 + 2.0 + 3.0)


def test_a_group_of_one_has_no_limit() -> None:
    assert TWO_NODES_SHARED.link(frozenset()).bytes_per_s == math.inf
    assert TWO_NODES_SHARED.link(frozenset()).latency_s == 0.0


def counted(cluster: Cluster, factors: Factors) -> float:
    """The slowest group's bandwidth by counting ranks: each crossing group's share of every unit it leaves."""
    groups: dict[int, list[int]] = {}
    for rank in range(cluster.devices):
        first = rank - sum((rank // factor.stride % factor.size) * factor.stride for factor in factors)
        groups.setdefault(first, []).append(rank)
    slowest, unit_size = math.inf, 1
    for level in cluster.levels:
        leaving = [group for group in groups.values() if len({rank // unit_size for rank in group}) > 1]
        for unit in range(cluster.devices // unit_size):
            members = [sum(rank // unit_size == unit for rank in group) for group in leaving]
            for count in filter(None, members):
                lanes = count / sum(members) if level.shared else count
                slowest = min(slowest, level.bytes_per_s * lanes)
        unit_size *= level.units
    return slowest


bandwidths = st.sampled_from([1.0, 3.0, 10.0, 64.0])
Levels = list[tuple[int, float, bool]]
level_lists = st.lists(st.tuples(st.sampled_from([2, 3, 4, 6]), bandwidths, st.booleans()), min_size=1, max_size=3)


@given(level_lists, st.data())
def test_a_group_gets_what_counting_its_members_says(levels: Levels, data: st.DataObject) -> None:
    """Any mix of factors that nest in the islands, as those of powers of two always do."""
    islands = cluster(*levels)
    nesting, stride = [], 1
    for level in islands.levels:
        for prime in prime_factors(level.units):
            nesting.append(Factor(stride, prime))
            stride *= prime
    factors = frozenset(data.draw(st.lists(st.sampled_from(nesting), unique=True)))
    assert islands.link(factors).bytes_per_s == pytest.approx(counted(islands, factors))


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_that_straddles_islands_is_not_promised_more_than_they_have(shared: bool) -> None:
    """{0, 1, 2} and {3, 4, 5} on three pairs: both have a member in the pair {2, 3}, and leave it together."""
    pairs = cluster((2, FAST, False), (3, SLOW, shared))
    factors = Strategy.parse("dp2-tp3").factors(Kind.TP)
    assert counted(pairs, factors) == (SLOW / 2 if shared else SLOW)
    assert pairs.link(factors).bytes_per_s <= counted(pairs, factors)


@pytest.mark.parametrize(
    ("stage_devices", "shared", "lanes", "latency_s"),
    [
        (8, SLOW / 8, SLOW, 2.0),  # eight transfers share the node's link
        (4, SLOW / 4, SLOW, 2.0),  # the border between the nodes is the slowest of three
        (1, SLOW, SLOW, 2.0),
        (16, math.inf, math.inf, 0.0),  # one stage sends nothing
    ],
)
def test_transfers_between_stages_on_two_nodes(
    stage_devices: int, shared: float, lanes: float, latency_s: float
) -> None:
    for nodes, bytes_per_s in ((TWO_NODES_SHARED, shared), (TWO_NODES_RAILS, lanes)):
        found = nodes.stage_link(stage_devices)
        assert (found.bytes_per_s, found.latency_s) == (bytes_per_s, latency_s)


def test_transfers_inside_a_node_use_a_lane_each() -> None:
    assert cluster((8, FAST, False)).stage_link(4).bytes_per_s == FAST


def test_transfers_use_their_own_bandwidth_where_it_is_given() -> None:
    slow_transfers = cluster((8, FAST, False), (2, SLOW, True), transfer=2.0)
    assert slow_transfers.stage_link(8).bytes_per_s == 2.0 / 8
    assert slow_transfers.stage_link(2).bytes_per_s == 2.0 / 2
    assert link(slow_transfers, "dp2-tp8", Kind.TP)[0] == FAST


def test_transfers_on_three_nodes_of_eight() -> None:
    nodes = cluster((8, FAST, False), (3, SLOW, True))
    assert nodes.stage_link(12).bytes_per_s == pytest.approx(SLOW / 8)  # a stage of one and a half nodes
    assert nodes.stage_link(3).bytes_per_s == pytest.approx(SLOW / 3)


def test_devices_are_the_product_of_the_levels() -> None:
    assert cluster().devices == 1
    assert cluster((8, FAST, False), (3, SLOW, True)).devices == 24


def test_links_are_uneven_when_speed_or_sharing_differs() -> None:
    assert not cluster((8, FAST, False)).has_uneven_links
    assert not cluster((2, FAST, False), (4, FAST, False)).has_uneven_links
    assert cluster((2, FAST, False), (4, FAST, True)).has_uneven_links
    assert TWO_NODES_RAILS.has_uneven_links


def test_digest_follows_the_facts_and_not_their_names() -> None:
    first = cluster((8, FAST, False))
    assert replace(first, name="other", source="elsewhere").digest == first.digest
    assert cluster((8, FAST, True)).digest != first.digest
    assert replace(first, reserved_bytes=1).digest != first.digest


def test_a_device_without_bf16_says_so() -> None:
    device = cluster().device
    assert device.precision is Precision.FP32
    assert device.flops_per_s(Precision.FP32) == 1e9
    with pytest.raises(InvalidInput, match="no bf16"):
        device.flops_per_s(Precision.BF16)
    assert replace(device, bf16_flops_per_s=2e9).flops_per_s(Precision.BF16) == 2e9


@given(st.integers(0, 10**12), st.integers(0, 10**10), st.floats(0, 0.5))
def test_the_least_budget_is_just_enough(tensors: int, reserved: int, fragmentation: float) -> None:
    some = replace(cluster(), reserved_bytes=reserved, fragmentation=fragmentation)
    budget = some.least_budget(tensors)
    assert some.tensor_bytes(budget) >= tensors
    assert some.tensor_bytes(budget - 2) < tensors or not tensors


@pytest.mark.parametrize(
    ("strategy", "shared", "lanes"),
    [
        ("dp2-tp8/dp2-ep8", FAST, FAST),  # inside a node each device has its lane
        # {i, i + 8}: all that is sent leaves the node, through an eighth of its link or through a lane.
        ("dp2-tp8/ep2-sdp8", SLOW / 8, SLOW),
        # All 16: of 15 parts 8 leave the node.
        ("dp16/ep16", SLOW / 8 * 15 / 8, SLOW * 15 / 8),
        # {0, 2, …, 14}: of 7 parts 4 leave; two such groups share the link, and 8 devices send.
        ("dp16/ep8-dp2", SLOW / 8 * 7 / 4, SLOW * 7 / 4),
    ],
)
def test_an_all_to_all_on_two_nodes_of_eight(strategy: str, shared: float, lanes: float) -> None:
    """By the levels: the slowest of what leaves devices (FAST) and what leaves nodes; a ring would pass each once."""
    group = Strategy.parse(strategy).expert_factors(Kind.EP)
    for where, expected in ((TWO_NODES_SHARED, shared), (TWO_NODES_RAILS, lanes)):
        found = where.link(group, Collective.ALL_TO_ALL)
        assert found.bytes_per_s == pytest.approx(min(expected, FAST))
        assert found.latency_s == where.link(group).latency_s, "of one pass"


@given(st.sampled_from([(4, 2), (2, 4), (2, 2, 2), (2, 3), (3, 2), (6, 2), (4, 3)]), st.data())
def test_an_all_to_all_takes_as_long_as_its_slowest_link(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Against a count of all bytes: each device sends each other member of its group a byte of g."""
    levels = [(units, data.draw(st.sampled_from([7.0, 20.0, 100.0])), data.draw(st.booleans())) for units in shape]
    some = cluster(*levels)
    primes = prime_factors(some.devices)
    strides = [math.prod(primes[place + 1 :]) for place in range(len(primes))]
    factors = [Factor(stride, prime) for stride, prime in zip(strides, primes, strict=True)]
    group = frozenset(data.draw(st.sets(st.sampled_from(factors), min_size=1)))
    size = math.prod(factor.size for factor in group)
    slowest, unit = 0.0, 1

    def first(rank: int) -> int:
        return rank - sum(rank // factor.stride % factor.size * factor.stride for factor in group)

    for units, bytes_per_s, shared in levels:
        leaving = [0] * some.devices
        for one in range(some.devices):
            for other in range(some.devices):
                leaving[one] += first(one) == first(other) and one // unit != other // unit
        for begin in range(0, some.devices, unit):
            here = leaving[begin : begin + unit]
            # A shared link gives each device that leaves an equal part, so the one that sends most is last.
            slowest = max(slowest, max(here) * (sum(map(bool, here)) if shared else 1) / bytes_per_s)
        unit *= units
    assert (size - 1) / some.link(group, Collective.ALL_TO_ALL).bytes_per_s == pytest.approx(slowest)


def test_a_measured_all_to_all_is_preferred_and_one_that_was_not_follows_from_the_levels() -> None:
    group = MeasuredGroup(
        ranks=(0, 1),
        **{
            f"{name}_{unit}": 3.0
            for name in Collective
            if name is not Collective.ALL_TO_ALL
            for unit in ("bytes_per_s", "latency_s")
        },
    )
    plain = cluster((2, FAST, False))
    pair = Strategy.parse("dp2").factors(Kind.DP)
    some = replace(plain, groups=(group,))
    assert some.link(pair).bytes_per_s == 3.0
    assert some.link(pair, Collective.ALL_TO_ALL).bytes_per_s == FAST
    assert "all_to_all_bytes_per_s" not in some.to_dict()["groups"][0], "files and digests stay as they were"
    measured = replace(some, groups=(replace(group, all_to_all_bytes_per_s=5.0, all_to_all_latency_s=0.5),))
    assert measured.link(pair, Collective.ALL_TO_ALL) == Link(5.0, 0.5)
    assert measured.digest != some.digest
