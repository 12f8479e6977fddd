"""What is searched, and what can be said of it before anything is priced."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.spec import GRADIENT_BYTES, Schedule
from galvatron.planner.cost import CostModel
from galvatron.planner.search.cuts import CutRule
from galvatron.planner.search.watch import UNWATCHED, Watch
from galvatron.planner.space import Space

__all__ = ["Problem", "most_micro_batches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is searched."""

    cost: CostModel
    space: Space
    budget: int
    """Bytes for tensors on each device."""
    batches: tuple[int, ...]
    max_micro_batches: int | None = None
    stages_a_micro_batch: int | None = None
    """Deep pipelines may have more than that: one micro-batch for so many stages; None: they may not."""
    max_micro_batch: int | None = None
    """Most samples of a micro-batch."""
    cuts: CutRule = CutRule.EXACT
    watch: Watch = UNWATCHED

    @property
    def schedule(self) -> Schedule:
        """Of pipelines."""
        return self.cost.schedule

    @property
    def floor(self) -> int:
        """Bytes that some device holds at least, whatever the plan: all together hold each state once. A gradient may
        come late, and what is frozen has no states."""
        model, kept = self.cost.model, self.cost.optimizer.bytes_per_parameter - GRADIENT_BYTES
        frozen = model.parameters - model.trained_parameters
        held = model.trained_parameters * kept + frozen * model.training.precision.bytes
        return int(held // self.cost.cluster.devices)

    def most_micro_batches(self, degree: int) -> int | None:
        """Most micro-batches of a pipeline with so many stages; None: any number."""
        return most_micro_batches(self.max_micro_batches, self.stages_a_micro_batch, degree)


def most_micro_batches(limit: int | None, stages_a_micro_batch: int | None, degree: int) -> int | None:
    """The limit, or where deep pipelines may have more, one for so many stages if that is more; None: any number."""
    if limit is None or stages_a_micro_batch is None:
        return limit
    return max(limit, degree // stages_a_micro_batch)
