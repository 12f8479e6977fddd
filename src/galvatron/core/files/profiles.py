"""Measured layers by name or from a TOML file (docs/clusters.md, "Measured layer times"), and written back to one.

name = "bert-huge-titan-rtx"
source = "measured on …"

[[layers]]
layer = "encoder"
forward = "2.39ms"
backward_ratio = 2.0

What a profiler writes besides (fixed parts, degrees of TP, memory) is in docs/profiling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from galvatron.core.errors import InvalidInput
from galvatron.core.files.toml_fields import duration, flag, number, size, text, whole
from galvatron.core.files.toml_files import load_named, parse_text, preset_names
from galvatron.core.files.toml_tables import Entry, Table, tables
from galvatron.core.spec.profile import LayerMemory, LayerTime, ModelProfile

__all__ = ["dump_profile", "load_profile", "profile_names"]

_FOLDER = "profiles"

_WAY = (
    Entry("tp", "tp", whole(1, 2**20), "degree of tensor parallelism at which it was measured"),
    Entry("sequence_parallel", "sequence_parallel", flag(), "whether with sequence parallelism"),
)
_LAYER = Table(
    LayerTime,
    (
        Entry("layer", "layer", text(), "the layer's name in the model, such as encoder"),
        Entry("forward", "forward_s", duration("1ns", "1000s"), "forward time of one sample, such as 2.39ms"),
        Entry("backward_ratio", "backward_ratio", number(0.01, 10_000), "backward time over forward time"),
        Entry("forward_fixed", "forward_fixed_s", duration("0s", "1000s"), "forward time besides that of the samples"),
        Entry("backward_fixed", "backward_fixed_s", duration("0s", "1000s"), "the same for backward"),
        Entry(
            "forward_least", "forward_least_s", duration("0s", "1000s"), "least forward time, however few the samples"
        ),
        Entry("backward_least", "backward_least_s", duration("0s", "1000s"), "the same for backward"),
        Entry(
            "forward_sharded",
            "forward_sharded_s",
            duration("0s", "1000s"),
            "forward time besides, where parameters are sharded",
        ),
        Entry("backward_sharded", "backward_sharded_s", duration("0s", "1000s"), "the same for backward"),
        Entry("recompute", "recompute_s", duration("0s", "1000s"), "time of recomputing it besides a second forward"),
        *_WAY,
    ),
)
_MEMORY = Table(
    LayerMemory,
    (
        Entry("layer", "layer", text(), "the layer's name in the model, such as encoder"),
        Entry("activations", "activation_bytes", size("0B"), "saved for backward by one sample, such as 40MiB"),
        Entry("transient", "transient_bytes", size("0B"), "most that backward takes on top, for one sample"),
        *_WAY,
    ),
)
_PROFILE = Table(
    ModelProfile,
    (
        Entry("name", "name", text(), "the profile's name"),
        Entry("source", "source", text(shortest=0, longest=4000, lines=True), "where the times were measured"),
        Entry("layers", "times", tables(_LAYER, least=1, most=10_000), "[[layers]] tables, one for each kind of layer"),
        Entry("memory", "memory", tables(_MEMORY, least=0, most=10_000), "[[memory]] tables, the same for memory"),
    ),
)


def profile_names() -> tuple[str, ...]:
    """The profiles known by name."""
    return preset_names(_FOLDER)


def load_profile(source: str | Path) -> ModelProfile:
    """The profile that ``source`` names: a preset, or the path of a ``.toml`` file."""
    return _checked(load_named(source, _FOLDER, "profile", _PROFILE), str(source))


def dump_profile(profile: ModelProfile) -> str:
    """The profile as a file that reads back equal; what no file may say is refused here."""
    content, file = "\n".join(_PROFILE.write(profile)) + "\n", f"profile {profile.name!r}"
    _checked(parse_text(content, file, _PROFILE), file)
    return content


def _checked(profile: ModelProfile, file: str) -> ModelProfile:
    """A layer named twice would have two times, of which the planner would take the first in silence."""
    kinds: tuple[tuple[str, Sequence[LayerTime | LayerMemory]], ...] = (
        ("layers", profile.times),
        ("memory", profile.memory),
    )
    for key, measured in kinds:
        seen: set[tuple[str, int, bool]] = set()
        for index, one in enumerate(measured):
            way = (one.layer, one.tp, one.sequence_parallel)
            if way in seen:
                raise InvalidInput(
                    f"{file}: {key}[{index}].layer is {one.layer!r} again; expected each layer once for each degree of "
                    "tensor parallelism"
                )
            seen.add(way)
    return profile
