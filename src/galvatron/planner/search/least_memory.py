"""The least memory with which one combination fits at all, its layers cut into stages as well as can be.

Time plays no part: each layer takes what needs least (``peaks.py``).

A stage with fewer layers never needs more. So with a budget given each stage takes as many layers as fit, and that all
of them find a place is what there is to check; the least budget is found by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from galvatron.planner.cost import NEVER, Integers, held_bytes
from galvatron.planner.search.combination import Combination
from galvatron.planner.search.peaks import Steps, Sums, held_by, useful_thetas

__all__ = ["LeastMemory"]


@dataclass(frozen=True, slots=True)
class _OwnedSums:
    """For each θ worth trying the least memory of all layers before each position, where the owner of a tied weight
    splits it in one way."""

    thetas: Integers
    """(N,)"""
    up_to: Integers
    """(N, L+1) of layers as they are."""
    of_owner: Integers
    """(N,)"""
    after: Integers
    """(N, L+1) of layers after the owner, which may have to split the weight anew."""


class LeastMemory:
    """What the stages of one combination need at least."""

    def __init__(self, combination: Combination) -> None:
        self._kinds: Integers = combination.layers.kinds
        self._in_flight, self._fixed = combination.in_flight, combination.fixed
        self._costs, self._micro_batch = combination.costs, combination.micro_batch
        self._sharing = self._costs.tied_places(self._kinds.tolist(), first=True)
        self._lean = combination.lean
        self._sums: dict[int, Sums] = {}
        self._owned: dict[tuple[int, int], list[_OwnedSums]] = {}

    def least(self, low: int, below: int) -> int | None:
        """The least budget if it is below this, known to be no less than ``low``."""
        high = self.peak_within(below - 1)
        if high is None or self._fixed:
            return high
        while low < high:
            middle = (low + high) // 2
            peak = self.peak_within(middle)
            if peak is None:
                low = middle + 1
            else:
                high = peak
        return high

    def peak_within(self, budget: int) -> int | None:
        """The fullest stage where each takes as many layers as fit; None: not all layers find a place."""
        if self._fixed:
            spans = enumerate(pairwise(self._fixed))
            peak = max(int(self._peaks(self._in_flight[p], begin)[end - begin - 1]) for p, (begin, end) in spans)
            return peak if peak <= budget else None
        stages, layers = len(self._in_flight), len(self._kinds)
        begin, fullest = 0, 0
        for stage, count in enumerate(self._in_flight):
            left_over = stages - stage - 1  # layers that other stages need
            peaks = self._peaks(count, begin)[: layers - left_over - begin]
            taken = int(np.searchsorted(peaks, budget, side="right"))
            if not taken:
                return None
            begin, fullest = begin + taken, max(fullest, int(peaks[taken - 1]))
        return fullest if begin == layers else None

    def _peaks(self, in_flight_count: int, begin: int) -> Integers:
        """Least memory of the stages that begin here, by their last layer."""
        sums = self._sums_of(in_flight_count)
        needed = sums.up_to[:, begin + 1 :] - sums.up_to[:, begin, None] + sums.thetas[:, None]
        peaks: Integers = needed.min(axis=0)
        sharing = [place for place in self._sharing if place >= begin]
        if len(sharing) > 1:
            owner, user = sharing[:2]
            peaks[user - begin :] = NEVER
            for owned in self._owned_of(in_flight_count, owner):
                before = owned.up_to[:, owner] - owned.up_to[:, begin] + owned.of_owner + owned.thetas
                needed = owned.after[:, user + 1 :] + (before - owned.after[:, owner + 1])[:, None]
                np.minimum(peaks[user - begin :], needed.min(axis=0), out=peaks[user - begin :])
        return peaks

    def _sums_of(self, in_flight_count: int) -> Sums:
        if in_flight_count not in self._sums:
            self._sums[in_flight_count] = Sums.of(self._lean, in_flight_count, self._kinds)
        return self._sums[in_flight_count]

    def _owned_of(self, in_flight_count: int, owner: int) -> list[_OwnedSums]:
        """For each way in which the owner may split the weight."""
        kind = int(self._kinds[owner])
        if (in_flight_count, kind) not in self._owned:
            splits = sorted(set(self._costs.split_of[kind, self._lean[kind].strategy].tolist()))
            self._owned[in_flight_count, kind] = [self._owned_sums(in_flight_count, kind, split) for split in splits]
        return self._owned[in_flight_count, kind]

    def _owned_sums(self, in_flight_count: int, owner: int, split: int) -> _OwnedSums:
        paid = self._costs.resplit(self._micro_batch, split)
        steps, late = [], []
        for kind, lean in enumerate(self._lean):
            memory, transient = held_by(lean, in_flight_count), lean.transient_bytes
            steps.append(Steps.of(memory, transient))
            late.append(
                Steps.of(
                    held_bytes(memory, paid.activation_bytes[kind, lean.strategy], in_flight_count),
                    transient + paid.transient_bytes[kind, lean.strategy],
                )
            )
        lean = self._lean[owner]
        held = self._costs.split_of[owner, lean.strategy] == split
        own = Steps.of(held_by(lean, in_flight_count)[held], lean.transient_bytes[held])
        thetas = useful_thetas([*steps, *late, own])
        before, after = (Sums.over(each, thetas, self._kinds).up_to for each in (steps, late))
        return _OwnedSums(thetas, before, own.least(thetas), after)
