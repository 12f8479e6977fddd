"""The few names for use from Python: what the command line does, with values instead of text."""

from __future__ import annotations

from pathlib import Path

from galvatron.plans.advice import make_plan
from galvatron.plans.plan import Plan
from galvatron.plans.setup import Setup, request_for
from galvatron.spec import Cluster, ModelSpec

__all__ = ["plan"]


def plan(
    model: str | Path | ModelSpec,
    cluster: str | Path | Cluster,
    *,
    memory: str | int | None = None,
    batch: int | None = None,
    batch_step: int | None = None,
    space: str = "full",
    schedule: str | None = None,
    precision: str | None = None,
    attention: str | None = None,
    paper: bool = False,
) -> Plan:
    """The provably best plan for a model (preset, file, folder or facts) on a cluster (preset, file or facts).

    ``memory`` is the budget of each device ("8GB", "8GiB", bytes; default: all it has), ``batch`` a fixed global batch.
    Raises :class:`galvatron.Infeasible` with advice when nothing fits.
    """
    setup = Setup(
        memory=memory,
        batch=batch,
        batch_step=batch_step,
        space=space,
        schedule=schedule,
        precision=precision,
        attention=attention,
        paper=paper,
    )
    return make_plan(request_for(model, cluster, setup))
