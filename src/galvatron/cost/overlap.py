"""Computation and communication at the same time (paper Section 3.4; docs/cost-model.md, "Overlap").

While both run, computation W is slowed by the factor σw and communication C by σc; what is left of the one that lasts
longer then runs alone at full speed. If computing ends first, σw·W of time goes by, in which σw·W/σc of the
communication is done: C + σw·W·(1 − 1/σc) in all. The paper has one factor for both, σ: max + (σ − 1)·min.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron.cost.communication import Floats
from galvatron.spec import Cluster

__all__ = ["Slowdown"]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Of each by the other."""

    compute: float
    communicate: float

    @classmethod
    def on(cls, cluster: Cluster) -> Slowdown:
        slowdown = cluster.overlap_slowdown
        return cls(slowdown, slowdown if cluster.communication_slowdown is None else cluster.communication_slowdown)

    def overlapped_s(self, compute_s: Floats, communicate_s: Floats) -> Floats:
        """Time of both together."""
        slow_compute, slow_communicate = self.compute * compute_s, self.communicate * communicate_s
        seconds: Floats = np.where(
            slow_compute <= slow_communicate,
            communicate_s + slow_compute * (1 - 1 / self.communicate),
            compute_s + slow_communicate * (1 - 1 / self.compute),
        )
        return seconds
