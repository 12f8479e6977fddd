"""What costs follow from: a model, a cluster, how the running system behaves, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import (
    ONE_F_ONE_B,
    Cluster,
    ModelProfile,
    ModelSpec,
    OptimizerSpec,
    Schedule,
    Strategy,
    optimizer_named,
)
from galvatron.planner.cost.conventions import Conventions

__all__ = ["CostInputs"]


@dataclass(frozen=True, kw_only=True)
class CostInputs:
    """A model on a cluster."""

    model: ModelSpec
    cluster: Cluster
    conventions: Conventions
    profile: ModelProfile | None = None
    schedule: Schedule = ONE_F_ONE_B
    """Of pipelines."""
    pins: tuple[tuple[str, Strategy], ...] = ()
    """Kinds of layer that keep a strategy: any other is impossible for them."""

    @property
    def optimizer(self) -> OptimizerSpec:
        return optimizer_named(self.model.training.optimizer)

    def late_gradients(self, micro_batches: NDArray[np.int64], *, pipelined: bool) -> NDArray[np.bool_]:
        """Whether no gradient is there while all activations are: each gets its place where some are gone."""
        forwards_first = pipelined and self.schedule.forwards_first
        late: NDArray[np.bool_] = self.conventions.late_gradients & ((micro_batches == 1) | forwards_first)
        return late
