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
from galvatron.core.files.tables import (
    BYTES,
    FLAG,
    NAME,
    SECONDS,
    SOURCE,
    Key,
    Table,
    Value,
    number,
    preset_names,
    whole,
)
from galvatron.core.spec.profile import LayerGrade, LayerMemory, LayerTime, ModelProfile

__all__ = ["dump_profile", "load_profile", "profile_names"]

_FOLDER = "profiles"
_TIME = SECONDS.between("0s", "1000s")
_SIZE = BYTES.between("0B", "1024TiB")

_DIGEST = Value(str, {"max_length": 64, "pattern": "^[0-9a-f]*$"})

_LAYER = Key("layer", "layer", NAME, "the layer's name in the model, such as encoder")
_VARIANT = (
    Key("tp", "tp", whole(1, 2**20), "degree of tensor parallelism at which it was measured"),
    Key("sequence_parallel", "sequence_parallel", FLAG, "whether with sequence parallelism"),
)
_TIMES = Table(
    LayerTime,
    (
        _LAYER,
        Key("parameters", "parameters", whole(0, 2**60), "of the layer that was measured; others are refused"),
        Key("flops", "forward_flops", whole(0, 2**60), "operations of one sample's forward; the same"),
        Key("forward", "forward_s", SECONDS.between("1ns", "1000s"), "forward time of one sample, such as 2.39ms"),
        Key("backward_ratio", "backward_ratio", number(0.01, 10_000), "backward time over forward time"),
        Key("forward_fixed", "forward_fixed_s", _TIME, "forward time besides that of the samples"),
        Key("backward_fixed", "backward_fixed_s", _TIME, "the same for backward"),
        Key("forward_least", "forward_least_s", _TIME, "least forward time, however few the samples"),
        Key("backward_least", "backward_least_s", _TIME, "the same for backward"),
        Key("forward_sharded", "forward_sharded_s", _TIME, "forward time besides, where parameters are sharded"),
        Key("backward_sharded", "backward_sharded_s", _TIME, "the same for backward"),
        Key("recompute", "recompute_s", _TIME, "time of recomputing it besides a second forward"),
        *_VARIANT,
        Key("ep", "ep", whole(1, 2**20), "degree of expert parallelism at which it was measured"),
        Key("fused_loss", "fused_loss", FLAG, "whether with its loss in chunks"),
    ),
    many=(1, 10_000),
)
_MEMORY = Table(
    LayerMemory,
    (
        _LAYER,
        Key("activations", "activation_bytes", _SIZE, "saved for backward by one sample, such as 40MiB"),
        Key("transient", "transient_bytes", _SIZE, "most that backward takes on top, for one sample"),
        *_VARIANT,
    ),
    many=(0, 10_000),
)
_GRADE_NAMES = ("rs", "ra")
_GRADES = Table(
    LayerGrade,
    (
        _LAYER,
        Key("grade", "grade", NAME, "rs: all but products and attention recomputed; ra: all but attention"),
        Key("share", "share", number(0, 100), "time of recomputing a sample over that of its forward"),
        Key("fixed", "fixed_s", _TIME, "time of recomputing besides that of the samples"),
        Key("activations", "activation_bytes", _SIZE, "saved for backward by one sample"),
    ),
    many=(0, 10_000),
)
_PROFILE = Table(
    ModelProfile,
    (
        Key("name", "name", NAME, "the profile's name"),
        Key("source", "source", SOURCE, "where the times were measured"),
        Key("fragmentation", "fragmentation", number(0, 0.5), "part of the memory that is lost between tensors"),
        Key("layers_digest", "layers_digest", _DIGEST, "which layers were measured; a profile of others is refused"),
        Key("layers", "times", _TIMES, "[[layers]] tables, one for each kind of layer"),
        Key("memory", "memory", _MEMORY, "[[memory]] tables, the same for memory"),
        Key("grades", "grades", _GRADES, "[[grades]] tables, of layers that are recomputed in part"),
    ),
)


def profile_names() -> tuple[str, ...]:
    """The profiles known by name."""
    return preset_names(_FOLDER)


def load_profile(source: str | Path) -> ModelProfile:
    """The profile that ``source`` names: a preset, or the path of a ``.toml`` file."""
    return _checked(_PROFILE.load(source, _FOLDER, "profile"), str(source))


def dump_profile(profile: ModelProfile) -> str:
    """The profile as a file that reads back equal; what no file may say is refused here."""
    content, file = "\n".join(_PROFILE.write(profile)) + "\n", f"profile {profile.name!r}"
    _checked(_PROFILE.parse(content, file), file)
    return content


def _checked(profile: ModelProfile, file: str) -> ModelProfile:
    """A layer named twice would have two times, of which the planner would take the first in silence."""
    kinds: tuple[tuple[str, Sequence[LayerTime | LayerMemory]], ...] = (
        ("layers", profile.times),
        ("memory", profile.memory),
    )
    for key, measured in kinds:
        seen: set[tuple[str, int, bool, int, bool]] = set()
        for index, one in enumerate(measured):
            ep, fused = (one.ep, one.fused_loss) if isinstance(one, LayerTime) else (1, False)
            variant = (one.layer, one.tp, one.sequence_parallel, ep, fused)
            if variant in seen:
                raise InvalidInput(
                    f"{file}: {key}[{index}].layer is {one.layer!r} again; expected each layer once for each degree of "
                    "tensor parallelism"
                )
            seen.add(variant)
    grades = [(one.layer, one.grade) for one in profile.grades]
    for index, grade in enumerate(grades):
        if grade in grades[:index] or grade[1] not in _GRADE_NAMES:
            raise InvalidInput(
                f"{file}: grades[{index}] is {grade[1]!r} of {grade[0]!r}; expected {' or '.join(_GRADE_NAMES)}, each "
                "once for a layer"
            )
    return profile
