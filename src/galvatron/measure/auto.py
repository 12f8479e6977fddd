"""Plans for the machine at hand: ``cluster="auto"``. Needs no torch in the caller's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.core.spec import ModelSpec
from galvatron.measure.clusters import profile_cluster
from galvatron.measure.layers import profile_model
from galvatron.measure.models import check_name, load_any_model
from galvatron.planner.plan.options import Setup, checked_setup
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.profiled import as_profiled
from galvatron.planner.plan.setup import request_for, training_of
from galvatron.processes.job import Progress

__all__ = ["AUTO", "request_here"]

AUTO = "auto"
"""In place of a cluster's name: this machine's devices, measured."""


def _unseen(what: str) -> AbstractContextManager[Progress | None]:
    return nullcontext()


def request_here(
    model: str | Path | ModelSpec | dict[str, Any],
    setup: Setup,
    *,
    devices: int | None = None,
    measuring: Callable[[str], AbstractContextManager[Progress | None]] = _unseen,
    fresh: bool = False,
) -> Request:
    """What a user means by ``auto``: this machine's cluster, and the model's layers measured on it unless the setup has
    a profile of them. Both come from the cache where they were measured before.

    ``devices``: how many of the machine's; None: all. ``measuring``: shows what is measured, and how far it has come.
    ``fresh``: nothing comes from the cache.
    """
    check_name(model, training_of(checked_setup(setup)))
    with measuring("devices and links") as progress:
        cluster = profile_cluster(devices, fresh=fresh, progress=progress)
    request = request_for(model, cluster, setup, load_any_model)
    if request.profile is not None or request.model.config is None:
        return request
    with measuring("layers") as progress:
        profile = profile_model(request.model, cluster, fresh=fresh, progress=progress)
    return replace(request, cluster=as_profiled(request.cluster, profile), profile=profile)
