"""Measured times of a model's layers, which the planner prefers to figures derived from operations and rates.

Paper Section 3.4: "the per-sample computation time … could be measured by profiling real layer execution time".
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

__all__ = ["LayerTime", "ModelProfile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Time of one kind of layer on one device."""

    layer: str
    """The layer's name in the model."""
    forward_s: float
    """Forward time of one sample."""
    backward_ratio: float = 2.0
    """Backward time over forward time; two for matrix products."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Layer times of one model on one kind of device; kinds that are missing are priced by their operations."""

    name: str
    times: tuple[LayerTime, ...]
    source: str = ""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def time_of(self, layer: str) -> LayerTime | None:
        return next((time for time in self.times if time.layer == layer), None)
