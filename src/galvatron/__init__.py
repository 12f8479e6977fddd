"""Galvatron finds the fastest way to train a Transformer on the devices you have, and proves it.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from galvatron.api import plan
    from galvatron.checkpoints.checkpoints import Checkpoints
    from galvatron.errors import (
        CheckpointCorrupt,
        GalvatronError,
        Infeasible,
        InvalidInput,
        PlanMismatch,
        SaveFailed,
        Unequal,
    )
    from galvatron.models.describe import describe
    from galvatron.plans.plan import Plan
    from galvatron.runtime.parallelize import parallelize
    from galvatron.spec import Cluster, ModelSpec, Strategy

__all__ = [
    "CheckpointCorrupt",
    "Checkpoints",
    "Cluster",
    "GalvatronError",
    "Infeasible",
    "InvalidInput",
    "ModelSpec",
    "Plan",
    "PlanMismatch",
    "SaveFailed",
    "Strategy",
    "Unequal",
    "describe",
    "parallelize",
    "plan",
]
__version__ = "0.1.0"

_HOMES = {
    "CheckpointCorrupt": "galvatron.errors",
    "Checkpoints": "galvatron.checkpoints.checkpoints",
    "Cluster": "galvatron.spec",
    "GalvatronError": "galvatron.errors",
    "Infeasible": "galvatron.errors",
    "InvalidInput": "galvatron.errors",
    "ModelSpec": "galvatron.spec",
    "Plan": "galvatron.plans.plan",
    "PlanMismatch": "galvatron.errors",
    "SaveFailed": "galvatron.errors",
    "Strategy": "galvatron.spec",
    "Unequal": "galvatron.errors",
    "describe": "galvatron.models.describe",
    "parallelize": "galvatron.runtime.parallelize",
    "plan": "galvatron.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'galvatron' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
