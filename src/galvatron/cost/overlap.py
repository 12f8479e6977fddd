"""Computation and communication at the same time (paper Section 3.4; docs/cost-model.md, "Overlap").

While both run, each is slowed by the factor σ; what is left of the longer one then runs alone at full speed:
σ·min + (max − min) = max + (σ − 1)·min.
"""

from __future__ import annotations

import numpy as np

from galvatron.cost.communication import Floats

__all__ = ["overlapped_s"]


def overlapped_s(compute_s: Floats, communicate_s: Floats, slowdown: float) -> Floats:
    seconds: Floats = np.maximum(compute_s, communicate_s) + (slowdown - 1) * np.minimum(compute_s, communicate_s)
    return seconds
