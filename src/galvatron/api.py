"""The few names for use from Python: what the command line does, with values instead of text."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from galvatron.plans.advice import make_plan
from galvatron.plans.plan import Plan
from galvatron.plans.setup import Options, Setup, request_for
from galvatron.spec import Cluster, ModelSpec

__all__ = ["plan"]


def plan(model: str | Path | ModelSpec, cluster: str | Path | Cluster, **options: Unpack[Options]) -> Plan:
    """The provably best plan for a model (preset, file, folder or facts) on a cluster (preset, file or facts).

    Options are those of the command line: ``memory`` is the budget of each device ("8GB", "8GiB", bytes; default: all
    it has), ``batch`` a fixed global batch, ``recompute=False`` turns an extension off, and so on; see
    :class:`galvatron.plans.setup.Setup`. Raises :class:`galvatron.Infeasible` with advice when nothing fits.
    """
    return make_plan(request_for(model, cluster, Setup(**options)))
