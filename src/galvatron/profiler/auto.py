"""Plans for the machine at hand: ``cluster="auto"``. Needs no torch in the caller's process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.plans.planner import Request
from galvatron.plans.setup import Setup, request_for
from galvatron.profiler.clusters import profile_cluster
from galvatron.profiler.layers import profile_model
from galvatron.profiler.processes import Progress
from galvatron.spec import ModelSpec

__all__ = ["AUTO", "request_here"]

AUTO = "auto"
"""In place of a cluster's name: this machine's devices, measured."""


def request_here(
    model: str | Path | ModelSpec | dict[str, Any], setup: Setup, progress: Progress | None = None
) -> Request:
    """What a user means by ``auto``: this machine's cluster, and the model's layers measured on it unless the setup has
    a profile of them. Both come from the cache where they were measured before."""
    request = request_for(model, profile_cluster(progress=progress), setup)
    if request.profile is not None or request.model.config is None:
        return request
    return replace(request, profile=profile_model(request.model, request.cluster, progress=progress))
