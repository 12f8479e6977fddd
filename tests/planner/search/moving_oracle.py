"""What moving activations costs, by keeping account of what a rank holds: an oracle for the cost model's tables.

Knows strategies and links, and nothing of forms or Slice-Gather's formulas. An all-gather over g ranks brings each of
them g − 1 pieces of what it holds; slicing brings nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from galvatron.core.spec import Cluster, Factor, Kind, ModelSpec, Strategy
from galvatron.planner.cost import Integers

Digits = frozenset[Factor]
Divided = tuple[Digits, Digits]
"""The factors of the rank that divide rows and sequences at a layer's borders."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Tables as the search takes them; strategies that divide activations alike are one layout."""

    layout_of: Integers
    change: Integers
    transfer: Integers


def divided(strategy: Strategy) -> Divided:
    rows = strategy.factors(Kind.DP, Kind.SDP)
    return rows, strategy.factors(Kind.TP) if strategy.sequence_parallel else frozenset()


def moves(
    strategies: Sequence[Strategy],
    model: ModelSpec,
    cluster: Cluster,
    *,
    micro_batch: int,
    pipelined: bool,
    counts_rows: bool,
) -> Moves:
    """``counts_rows``: rows cannot be divided further than there are."""
    ways = list(dict.fromkeys(divided(strategy) for strategy in strategies))
    sizes = [micro_batch * kind.boundary_bytes for kind in model.kinds]
    link = cluster.stage_link(strategies[0].devices) if pipelined else None

    def received_s(size: int, way: Divided) -> float:
        return 0.0 if link is None else size / ranks(way[0]) / ranks(way[1]) / link.bytes_per_s + link.latency_s

    rows = micro_batch if counts_rows else 0

    def both_s(size: int, one: Divided, other: Divided) -> float:
        return change_s(size, rows, one, other, cluster) + change_s(size, rows, other, one, cluster)

    change = [[[both_s(size, a, b) for b in ways] for a in ways] for size in sizes]
    transfer = [[received_s(size, way) for way in ways] for size in sizes]
    return Moves(
        np.array([ways.index(divided(strategy)) for strategy in strategies]), _whole_ns(change), _whole_ns(transfer)
    )


def change_s(size: int, count: int, before: Divided, after: Divided, cluster: Cluster) -> float:
    """One direction between two layers of a stage: sequences whole, rows changed, sequences sliced.

    ``count``: of the rows; 0, which everything divides: enough of them.
    """
    (rows, sequence), (wanted_rows, wanted_sequence) = before, after
    held, seconds = size / ranks(rows) / ranks(sequence), 0.0

    def gather(factors: Digits) -> None:
        nonlocal held, seconds
        if factors:
            link = cluster.link(factors)
            seconds += held * (ranks(factors) - 1) / link.bytes_per_s + link.latency_s
            held *= ranks(factors)

    if sequence != wanted_sequence:
        gather(sequence)
    if all(_one_radix(a, b) for a in rows for b in wanted_rows) and count % ranks(rows | wanted_rows) == 0:
        held /= ranks(wanted_rows - rows)
        gather(rows - wanted_rows)
    elif not rows <= wanted_rows:
        gather(rows)
    return seconds


def ranks(factors: Digits) -> int:
    return math.prod(factor.size for factor in factors)


def _one_radix(a: Factor, b: Factor) -> bool:
    return a == b or a.stride % (b.stride * b.size) == 0 or b.stride % (a.stride * a.size) == 0


def _whole_ns(seconds: object) -> Integers:
    rounded: Integers = np.ceil(np.array(seconds) * 1e9 - 1e-6).astype(np.int64)
    return rounded
