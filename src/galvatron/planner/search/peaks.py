"""The least memory of stages, whatever time they take: each layer takes what needs least under a largest transient θ.

A stage's peak is the sum over its layers and one largest transient. Only where some kind's least memory falls does a
larger θ pay: those are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from galvatron.planner.cost import NEVER, Integers, held_bytes
from galvatron.planner.search.candidates import Lean

__all__ = ["Steps", "Sums", "held_by", "useful_thetas"]


def held_by(lean: Lean, in_flight_count: int) -> Integers:
    """Memory of each, with so many micro-batches in flight."""
    return held_bytes(lean.state_bytes, lean.activation_bytes, in_flight_count)


@dataclass(frozen=True, slots=True)
class Steps:
    """Where the least memory of a kind of layer falls as larger transients are allowed."""

    thetas: Integers
    memory: Integers

    @classmethod
    def of(cls, memory: Integers, transient: Integers) -> Steps:
        order = np.lexsort((memory, transient))
        memory, transient = memory[order], transient[order]
        falls = np.ones(len(order), dtype=bool)
        np.less(memory[1:], np.minimum.accumulate(memory)[:-1], out=falls[1:])
        return cls(transient[falls], memory[falls])

    def least(self, thetas: Integers) -> Integers:
        """Under each of these; NEVER where nothing is allowed."""
        return np.append(NEVER, self.memory)[np.searchsorted(self.thetas, thetas, side="right")]


def useful_thetas(steps: Sequence[Steps]) -> Integers:
    """Those at which something falls; where nothing is possible, one for the form's sake."""
    thetas = np.unique(np.concatenate([each.thetas for each in steps]))
    return thetas if len(thetas) else np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Sums:
    """For each θ worth trying the least memory of all layers before each position."""

    thetas: Integers
    """(N,)"""
    up_to: Integers
    """(N, L+1)"""

    @classmethod
    def of(cls, leans: Sequence[Lean], in_flight_count: int, kinds: Integers) -> Sums:
        """Of layers of these kinds, by what each kind may take."""
        steps = [Steps.of(held_by(lean, in_flight_count), lean.transient_bytes) for lean in leans]
        return cls.over(steps, useful_thetas(steps), kinds)

    @classmethod
    def over(cls, steps: Sequence[Steps], thetas: Integers, kinds: Integers) -> Sums:
        least = np.stack([each.least(thetas) for each in steps])
        sums = np.zeros((len(thetas), len(kinds) + 1), dtype=np.int64)
        np.cumsum(least[kinds].T, axis=1, out=sums[:, 1:])
        return cls(thetas, sums)

    def peaks(self, begins: Integers, ends: Integers) -> Integers:
        """Least peak of the stages between these positions."""
        peaks = np.full(np.broadcast_shapes(begins.shape, ends.shape), NEVER)
        for theta, up_to in zip(self.thetas.tolist(), self.up_to, strict=True):
            np.minimum(peaks, up_to[ends] - up_to[begins] + theta, out=peaks)
        return peaks
