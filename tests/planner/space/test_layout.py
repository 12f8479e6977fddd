"""Layouts and layouts against a simulation of who holds which rows and tokens.

A batch has one row a rank and is viewed with one axis a factor of the rank: under a layout a rank holds the rows that
agree with it in the layout's factors, and likewise the tokens of a sequence. What would break: a Slice-Gather that
leaves a rank with a row missing or one too many, or that is priced for other rows or tokens than it moves.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from longer import longer

from galvatron.core.spec import (
    Cluster,
    Device,
    Factor,
    Factors,
    Kind,
    Layout,
    Level,
    Strategy,
    degree_of,
    gathered_factors,
    prime_factors,
    sequence_change,
)
from galvatron.planner.cost.slice_gather import layout_rates
from galvatron.planner.space import Space, Switches

Rows = list[frozenset[int]]
"""What each rank holds."""


def layouts_of(devices: int) -> list[Factors]:
    """Every layout that some strategy has, hybrid sharding included."""
    strategies = Space(name="full", title="", switches=Switches(hybrid_sharding=True)).strategies(devices)
    return list(dict.fromkeys(strategy.batch_factors for strategy in strategies))


def value(number: int, factor: Factor) -> int:
    return number // factor.stride % factor.size


def agreeing(rank: int, rows: frozenset[int], factors: Factors) -> frozenset[int]:
    return frozenset(row for row in rows if all(value(row, factor) == value(rank, factor) for factor in factors))


def held(devices: int, layout: Factors) -> Rows:
    everything = frozenset(range(devices))
    return [agreeing(rank, everything, layout) for rank in range(devices)]


def group(rank: int, factors: Factors) -> list[int]:
    """The ranks that differ from this one in no factor but these."""
    origin = rank - sum(value(rank, factor) * factor.stride for factor in factors)
    turns = product(*(range(factor.size) for factor in factors))
    return [origin + sum(v * factor.stride for v, factor in zip(values, factors, strict=True)) for values in turns]


def gather(rows: Rows, factors: Factors) -> Rows:
    """All-gather over the groups of these factors."""
    return [frozenset().union(*(rows[member] for member in group(rank, factors))) for rank in range(len(rows))]


def slice_rows(rows: Rows, factors: Factors) -> Rows:
    return [agreeing(rank, have, factors) for rank, have in enumerate(rows)]


def changed(devices: int, source: Factors, target: Factors) -> tuple[Rows, int]:
    """Rows after Slice-Gather over the returned factors, and how many rows a rank receives.

    What is not wanted is sliced off before the gather where that leads to the target, else after it.
    """
    factors = gathered_factors(source, target, devices)
    before = slice_rows(held(devices, source), target - source)
    after = gather(before, factors)
    if after == held(devices, target):
        return after, len(after[0]) - len(before[0])
    before = held(devices, source)
    after = gather(before, factors)
    return slice_rows(after, target), len(after[0]) - len(before[0])


@pytest.mark.parametrize("devices", [4, 6, 8, 12])
def test_slice_gather_gives_every_rank_exactly_its_rows(devices: int) -> None:
    layouts = layouts_of(devices)
    for source, target in product(layouts, repeat=2):
        rows, _ = changed(devices, source, target)
        assert rows == held(devices, target), (source, target)


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_on_powers_of_two_nothing_is_gathered_in_vain(devices: int) -> None:
    """Slicing always comes first, and gathering over any fewer factors would leave rows missing."""
    layouts = layouts_of(devices)
    for source, target in product(layouts, repeat=2):
        factors = gathered_factors(source, target, devices)
        sliced = slice_rows(held(devices, source), target - source)
        assert gather(sliced, factors) == held(devices, target)
        for factor in factors:
            assert gather(sliced, factors - {factor}) != held(devices, target)


@pytest.mark.parametrize("devices", [4, 6, 8, 12])
def test_nothing_is_gathered_between_equal_layouts_or_towards_finer_ones(devices: int) -> None:
    for source, target in product(layouts_of(devices), repeat=2):
        if source <= target:
            assert gathered_factors(source, target, devices) == frozenset()


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_layouts_are_equal_exactly_where_rows_are(devices: int) -> None:
    """Powers of two: layouts can be told apart by their factors, so equal ones never pay for a change."""
    rows = [tuple(held(devices, layout)) for layout in layouts_of(devices)]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (2, 2), (4, 4), (8, 7)])
def test_number_of_layouts(devices: int, count: int) -> None:
    """On 8 devices TP and data axes leave: none, all, and an outer, inner or middle part of the rank's bits."""
    assert len(layouts_of(devices)) == count


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12, 30])
def test_digits_of_the_kinds_divide_the_rank(devices: int) -> None:
    """The factors of all axes number the ranks: every rank has its own combination of factors."""
    for strategy in Space(name="full", title="", switches=Switches(hybrid_sharding=True)).strategies(devices):
        factors = sorted(strategy.factors(*Kind))
        assert len({tuple(value(rank, factor) for factor in factors) for rank in range(devices)}) == devices
        sizes = {kind: int(np.prod([factor.size for factor in strategy.factors(kind)])) for kind in Kind}
        assert sizes == {kind: strategy.degree(kind) for kind in Kind}


def test_the_outermost_axis_owns_the_largest_strides() -> None:
    strategy = Strategy.parse("dp2-tp4")
    assert strategy.factors(Kind.DP) == {Factor(4, 2)}
    assert strategy.factors(Kind.TP) == {Factor(2, 2), Factor(1, 2)}
    assert strategy.batch_factors == {Factor(4, 2)}
    assert Strategy.parse("tp4-dp2").batch_factors == {Factor(1, 2)}
    assert Strategy.parse("sdp2-tp4").batch_factors == strategy.batch_factors


def test_prime_factors() -> None:
    for number in range(1, 500):
        factors = prime_factors(number)
        assert int(np.prod(factors, dtype=np.int64)) == number
        assert list(factors) == sorted(factors, reverse=True)
        assert all(factor % d for factor in factors for d in range(2, factor))


def _flat_cluster(devices: int) -> Cluster:
    """One byte a second for everyone, no latency: what a change costs is what a rank receives."""
    device = Device(name="device", memory_bytes=1, memory_bytes_per_s=1.0, fp32_flops_per_s=1.0)
    level = Level(name="flat", units=devices, bytes_per_s=1.0, latency_s=0.0, shared=False)
    return Cluster(name="flat", device=device, levels=(level,), reserved_bytes=0)


@pytest.mark.parametrize("devices", [4, 6, 8, 12])
def test_a_change_is_priced_by_the_rows_it_moves(devices: int) -> None:
    """Forward and backward together, as a share of the batch."""
    layouts = layouts_of(devices)
    rates = layout_rates([Layout(layout) for layout in layouts], _flat_cluster(devices))
    assert not rates.fixed_s.any()
    per_byte = rates.change_s(devices, np.array(1.0))
    differ = []
    for (i, source), (j, target) in product(enumerate(layouts), repeat=2):
        received = changed(devices, source, target)[1] + changed(devices, target, source)[1]
        if not np.isclose(per_byte[i, j], received / devices, rtol=1e-12):
            differ.append((sorted(source), sorted(target), float(per_byte[i, j]), received / devices))
    assert differ == []


def _forms_of(devices: int) -> list[Layout]:
    switches = Switches(hybrid_sharding=True, sequence_parallel=True)
    strategies = Space(name="full", title="", switches=switches).strategies(devices)
    return list(dict.fromkeys(strategy.layout for strategy in strategies))


def _cells_received(devices: int, source: Layout, target: Layout) -> int:
    """Cells (row, token) that a rank receives on the way, after checking that it ends with those it should hold."""
    rows, tokens = held(devices, source.rows), held(devices, source.sequence)
    received = 0
    if source.sequence != target.sequence:
        whole = gather(tokens, source.sequence)
        received += len(rows[0]) * (len(whole[0]) - len(tokens[0]))
        tokens = whole
    rows, received_rows = changed(devices, source.rows, target.rows)
    received += received_rows * len(tokens[0])
    if source.sequence != target.sequence:
        tokens = slice_rows(tokens, target.sequence)
    assert (rows, tokens) == (held(devices, target.rows), held(devices, target.sequence))
    return received


@pytest.mark.parametrize("devices", [4, 6, 8, longer(12)])
def test_a_change_of_form_is_priced_by_the_cells_it_moves(devices: int) -> None:
    layouts = _forms_of(devices)
    per_byte = layout_rates(layouts, _flat_cluster(devices)).change_s(devices, np.array(1.0))
    differ = []
    for (i, source), (j, target) in product(enumerate(layouts), repeat=2):
        received = _cells_received(devices, source, target) + _cells_received(devices, target, source)
        if not np.isclose(per_byte[i, j], received / devices**2, rtol=1e-12):
            differ.append((source, target, float(per_byte[i, j]), received / devices**2))
    assert differ == []


@pytest.mark.parametrize("devices", [6, 8, longer(12)])
def test_pairs_with_divided_sequences_are_priced_as_each_is_changed(devices: int) -> None:
    """All pairs are priced at once; a rank receives what the runtime's change of each pair says."""
    switches = Switches(hybrid_sharding=True, sequence_parallel=True, context_parallel=True)
    strategies = Space(name="full", title="", switches=switches).strategies(devices)
    layouts = list(dict.fromkeys(strategy.layout for strategy in strategies))
    level = replace(_flat_cluster(devices).levels[0], latency_s=1000.0)
    cluster = replace(_flat_cluster(devices), levels=(level,))
    seconds = layout_rates(layouts, cluster).change_s(devices, np.array(1.0))

    def taken(source: Layout, target: Layout) -> float:
        change, rows = sequence_change(source, target), gathered_factors(source.rows, target.rows, devices)
        kept = 1 / degree_of(change.kept)
        of_sequences = (kept - 1 / degree_of(source.sequence)) / degree_of(source.rows)
        of_rows = changed(devices, source.rows, target.rows)[1] / devices * kept
        waited = sum(cluster.link(factors).latency_s for factors in (frozenset(change.gathered), rows) if factors)
        return of_sequences + of_rows + waited

    expected = [[taken(source, target) + taken(target, source) for target in layouts] for source in layouts]
    assert np.allclose(seconds, expected, rtol=1e-12, atol=0)
    assert any(layout.zigzag for layout in layouts)


def test_forms_tell_sequence_parallel_layers_apart() -> None:
    plain, sequence = (Strategy.parse(text).layout for text in ("dp2-tp4", "dp2-tp4+sp"))
    assert plain.rows == sequence.rows == {Factor(4, 2)}
    assert not plain.sequence
    assert sequence.sequence == {Factor(2, 2), Factor(1, 2)}
    assert (plain.parts, sequence.parts) == (2, 8)
    assert Strategy.parse("sdp2-tp4+sp+rc").layout == sequence
    assert Strategy.parse("dp8").layout == Layout(Strategy.parse("dp8").batch_factors)
