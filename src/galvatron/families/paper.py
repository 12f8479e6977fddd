"""The paper's own machine: measured layer times for its models, where we have them (docs/paper-profile.md)."""

from __future__ import annotations

from galvatron.core.files.profiles import load_profile, profile_names
from galvatron.core.spec import Cluster, ModelProfile, ModelSpec

__all__ = ["paper_profile"]


def paper_profile(model: ModelSpec, cluster: Cluster) -> ModelProfile | None:
    """Layer times of one of the paper's models ("bert-huge-48": any depth) on the paper's device, if known."""
    device = cluster.device.name.lower().replace(" ", "-")
    name = f"{device}-{model.name.rpartition('-')[0]}"
    return load_profile(name) if name in profile_names() else None
