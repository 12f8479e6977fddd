"""What moving activations costs, by keeping account of what a rank holds: an oracle for the cost model's tables.

Knows strategies and links, and nothing of layouts or Slice-Gather's formulas. An all-gather over g ranks brings each of
them g − 1 pieces of what it holds; slicing brings nothing. Which tokens a rank holds is counted out, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from galvatron.core.spec import Cluster, Factor, Kind, ModelSpec, Strategy
from galvatron.planner.cost import Integers

Digits = frozenset[Factor]


@dataclass(frozen=True, slots=True)
class Divided:
    """How activations lie at a layer's borders. Strategies are one layout where every rank has the same."""

    rows: Digits
    """The factors of the rank that divide the rows."""
    tokens: tuple[tuple[int, ...], ...]
    """Of a sequence, those that each rank of the stage holds, in its order."""
    sequence: tuple[Factor, ...] = field(compare=False)
    """The factors that divide sequences, the first to divide first."""
    ring: Digits = field(compare=False)

    @property
    def parts(self) -> int:
        return ranks(self.rows) * math.prod(factor.size for factor in self.sequence)


@dataclass(frozen=True, slots=True)
class Moves:
    """Tables as the search takes them; strategies that divide activations alike are one layout."""

    layout_of: Integers
    change: Integers
    transfer: Integers


@cache
def divided(strategy: Strategy) -> Divided:
    """Ring first, then Ulysses, then TP under sequence parallelism, wherever their axes are."""
    kinds = [Kind.RING, Kind.ULYSSES, *([Kind.TP] if strategy.sequence_parallel else [])]
    order = tuple(factor for kind in kinds for factor in sorted(strategy.factors(kind), reverse=True))
    held = tuple(_tokens(strategy, rank) for rank in range(strategy.devices)) if order else ()
    return Divided(strategy.factors(Kind.DP, Kind.SDP), held, order, strategy.factors(Kind.RING))


def _tokens(strategy: Strategy, rank: int) -> tuple[int, ...]:
    """Of a sequence of two tokens a device: of a ring of R each rank has one of 2R chunks from the front and one from
    the back; the rest is divided in order."""
    tokens = tuple(range(2 * strategy.devices))
    ring = strategy.degree(Kind.RING)
    if ring > 1:
        size, own = len(tokens) // (2 * ring), _number(strategy, rank, Kind.RING)
        back = len(tokens) - own * size
        tokens = tokens[own * size : (own + 1) * size] + tokens[back - size : back]
    for kind in (Kind.ULYSSES, Kind.TP):
        if kind is Kind.ULYSSES or strategy.sequence_parallel:
            size = len(tokens) // strategy.degree(kind)
            own = _number(strategy, rank, kind)
            tokens = tokens[own * size : (own + 1) * size]
    return tokens


def _number(strategy: Strategy, rank: int, kind: Kind) -> int:
    """Of a rank along an axis."""
    for axis in reversed(strategy.axes):
        if axis.kind is kind:
            return rank % axis.degree
        rank //= axis.degree
    return 0


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
        return 0.0 if link is None else size / way.parts / link.bytes_per_s + link.latency_s

    rows = micro_batch if counts_rows else 0

    def both_s(size: int, one: Divided, other: Divided) -> float:
        return change_s(size, rows, one, other, cluster) + change_s(size, rows, other, one, cluster)

    change = [[[both_s(size, a, b) for b in ways] for a in ways] for size in sizes]
    transfer = [[received_s(size, way) for way in ways] for size in sizes]
    return Moves(
        np.array([ways.index(divided(strategy)) for strategy in strategies]), _whole_ns(change), _whole_ns(transfer)
    )


def change_s(size: int, count: int, before: Divided, after: Divided, cluster: Cluster) -> float:
    """One direction between two layers of a stage: what sequences lack, rows changed, sequences sliced.

    Where rows stay, ranks gather just as many of the factors that divided sequences last as it takes to have the tokens
    that they need. ``count``: of the rows; 0, which everything divides: enough of them.
    """
    rows, wanted_rows = before.rows, after.rows
    held, seconds = size / before.parts, 0.0

    def gather(factors: Digits) -> None:
        nonlocal held, seconds
        if factors:
            link = cluster.link(factors)
            seconds += held * (ranks(factors) - 1) / link.bytes_per_s + link.latency_s
            held *= ranks(factors)

    if before.tokens != after.tokens:
        gather(_lacking(before, after) if rows == wanted_rows else frozenset(before.sequence))
    if all(_one_radix(a, b) for a in rows for b in wanted_rows) and count % ranks(rows | wanted_rows) == 0:
        held /= ranks(wanted_rows - rows)
        gather(rows - wanted_rows)
    elif not rows <= wanted_rows:
        gather(rows)
    return seconds


@cache
def _lacking(before: Divided, after: Divided) -> Digits:
    """The factors over which each rank gathers until it has its tokens, the last to divide first. From one ring to
    another, sequences are put together whole."""
    if not before.sequence or not after.sequence or before.ring != after.ring:
        return frozenset(before.sequence)
    held = [set(tokens) for tokens in before.tokens]
    gathered: list[Factor] = []
    for factor in reversed(before.sequence):
        if all(set(wanted) <= have for wanted, have in zip(after.tokens, held, strict=True)):
            break
        gathered.append(factor)
        turns = [
            [
                rank - rank // factor.stride % factor.size * factor.stride + turn * factor.stride
                for turn in range(factor.size)
            ]
            for rank in range(len(held))
        ]
        held = [set().union(*(held[other] for other in others)) for others in turns]
    return frozenset(gathered)


def ranks(factors: Digits) -> int:
    return math.prod(factor.size for factor in factors)


def _one_radix(a: Factor, b: Factor) -> bool:
    return a == b or a.stride % (b.stride * b.size) == 0 or b.stride % (a.stride * a.size) == 0


def _whole_ns(seconds: object) -> Integers:
    rounded: Integers = np.ceil(np.array(seconds) * 1e9 - 1e-6).astype(np.int64)
    return rounded
