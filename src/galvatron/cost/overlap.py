"""Computation and communication at the same time (paper Section 3.4; docs/cost-model.md, "Overlap")."""

from __future__ import annotations

import numpy as np

from galvatron.cost.communication import Floats

__all__ = ["overlapped_s"]


def overlapped_s(compute_s: Floats, communicate_s: Floats, slowdown: float) -> Floats:
    """Time of both together: each is slowed by the factor while both run, and what is left of the longer one then runs
    alone at full speed."""
    seconds: Floats = np.maximum(compute_s, communicate_s) + (slowdown - 1) * np.minimum(compute_s, communicate_s)
    return seconds
