"""The plan: the one artifact that planner and runtime share.

A plan is complete: it embeds the facts of the model and the cluster it was made for, so that it can be run, repriced
and explained from the file alone. Reading is strict; see :func:`Plan.load`. The format is in docs/plan-format.md.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from galvatron.core.errors import InvalidInput
from galvatron.core.units import format_bytes
from galvatron.planner.plan.record import PlanRecord

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanRecord):
    """How to train a model on a cluster, and what that will cost."""

    def __repr__(self) -> str:
        """One line; ``to_json()`` has everything."""
        return (
            f"<Plan of {self.model.name} on {self.cluster.devices} × {self.cluster.facts.device.name}: "
            f"{self.throughput:.4g} samples/s, batch {self.batch} = {self.micro_batches} × {self.micro_batch}, "
            f"{self.pipeline_degree} stage{'s' * (self.pipeline_degree > 1)} ({self.schedule}), "
            f"{format_bytes(self.memory_bytes)} of {format_bytes(self.memory_budget_bytes)}>"
        )

    def to_json(self) -> str:
        """Text that is identical from run to run: fixed order of keys, no times or places of the search itself."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise InvalidInput(f"plan: {path!r} given as its file; expected a name such as plan.json")
        path = Path(path)
        try:
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write plan to {str(path)!r}: {error.strerror or error}") from error

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from galvatron.planner.plan.notebook import notebook_html  # only a notebook asks

        return notebook_html(self)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file, or raise :class:`galvatron.InvalidInput` naming file, field, value and remedy."""
        from galvatron.planner.plan.reading import read_plan  # pydantic is only needed to read

        if not isinstance(path, str | os.PathLike):
            raise InvalidInput(f"plan: {path!r} given as its file; expected a name such as plan.json")
        return read_plan(Path(path), Plan)
