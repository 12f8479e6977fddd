"""The profile that a user names, and whether its layers are the model's."""

from __future__ import annotations

import logging
from dataclasses import replace

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Cluster, ModelProfile, ModelSpec
from galvatron.families import load_profile, paper_profile
from galvatron.planner.plan.options import Setup

__all__ = ["as_profiled", "profile_for"]

_LOG = logging.getLogger(__name__)
_FIGURES = (("parameters", "parameters", 0.0), ("forward_flops", "operations a sample", 0.05))
"""What tells layers apart, in words, and how far it may be off: fused attention leaves out some operations."""


def as_profiled(cluster: Cluster, profile: ModelProfile | None) -> Cluster:
    """The cluster with what its allocators lose while they train this model, where they lose something and that was
    measured."""
    if profile is None or profile.fragmentation is None or not cluster.fragmentation:
        return cluster
    return replace(cluster, fragmentation=profile.fragmentation)


def profile_for(setup: Setup, model: ModelSpec, cluster: Cluster) -> ModelProfile | None:
    """The one that the user names, or the paper's where that is asked for. Raises :class:`InvalidInput` for one of
    another model."""
    given = setup.get("profile")
    if given is None:
        return paper_profile(model, cluster) if setup.get("paper") else None
    profile = load_profile(given)
    if profile.layers_digest not in ("", model.layers_digest):
        raise InvalidInput(
            f"profile {profile.name!r} was measured with other layers than those of {model.name}: of another "
            "model, precision, length, attention, or compiled or not; measure this with 'galvatron profile model'"
        )
    kinds = model.untuned().kinds
    times = [(kind, time) for kind in kinds if (time := profile.time_of(kind.name)) is not None]
    if not times:
        raise InvalidInput(
            f"profile {profile.name!r} has times for none of the layers of {model.name} "
            f"({', '.join(kind.name for kind in kinds)}); give a profile of this model"
        )
    for kind, time in times:
        for field, counted, most in _FIGURES:
            known, own = getattr(time, field), getattr(kind, field)
            if known is not None and abs(own - known) > most * known:
                raise InvalidInput(
                    f"profile {profile.name!r} was measured with {kind.name!r} of {known:,} {counted}; that of "
                    f"{model.name} has {own:,}; give a profile of this model and length"
                )
    if not profile.layers_digest and all(time.parameters is time.forward_flops is None for time in profile.times):
        _LOG.warning(
            "profile %r does not say which layers it has times of; they are taken for those of %s. 'parameters' and "
            "'flops' beside each time let that be checked",
            profile.name,
            model.name,
        )
    return profile
