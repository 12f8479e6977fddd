"""Galvatron finds the fastest way to train a Transformer on the devices you have, and proves it.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from galvatron.api import plan
    from galvatron.core.errors import (
        CheckpointCorrupt,
        GalvatronError,
        Infeasible,
        InvalidInput,
        PlanMismatch,
        SaveFailed,
        Unequal,
    )
    from galvatron.core.spec import Cluster, ModelSpec, Strategy
    from galvatron.measure.describe import describe
    from galvatron.planner.plan.plan import Plan
    from galvatron.runtime.parallelize import parallelize
    from galvatron.train.checkpoints.checkpoints import Checkpoints

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
    "CheckpointCorrupt": "galvatron.core.errors",
    "Checkpoints": "galvatron.train.checkpoints.checkpoints",
    "Cluster": "galvatron.core.spec",
    "GalvatronError": "galvatron.core.errors",
    "Infeasible": "galvatron.core.errors",
    "InvalidInput": "galvatron.core.errors",
    "ModelSpec": "galvatron.core.spec",
    "Plan": "galvatron.planner.plan.plan",
    "PlanMismatch": "galvatron.core.errors",
    "SaveFailed": "galvatron.core.errors",
    "Strategy": "galvatron.core.spec",
    "Unequal": "galvatron.core.errors",
    "describe": "galvatron.measure.describe",
    "parallelize": "galvatron.runtime.parallelize",
    "plan": "galvatron.api",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'galvatron' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
