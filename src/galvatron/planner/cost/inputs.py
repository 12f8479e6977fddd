"""What costs follow from: a model, a cluster, how the running system behaves, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.spec import Cluster, ModelProfile, ModelSpec, OptimizerSpec, Strategy, optimizer_named
from galvatron.planner.cost.conventions import Conventions

__all__ = ["CostInputs"]


@dataclass(frozen=True, kw_only=True)
class CostInputs:
    """A model on a cluster."""

    model: ModelSpec
    cluster: Cluster
    conventions: Conventions
    profile: ModelProfile | None = None
    pins: tuple[tuple[str, Strategy], ...] = ()
    """Kinds of layer that keep a strategy: any other is impossible for them."""

    @property
    def optimizer(self) -> OptimizerSpec:
        return optimizer_named(self.model.training.optimizer)
