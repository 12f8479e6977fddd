"""Facts: models, clusters, strategies, schedules, profiles. Imports nothing of the package but errors."""

from galvatron.core.spec.cluster import Cluster, Collective, Device, Level, Link, MeasuredGroup
from galvatron.core.spec.model import Attention, LayerSpec, ModelSpec, Precision, TensorParallel, Training
from galvatron.core.spec.profile import LayerMemory, LayerTime, ModelProfile
from galvatron.core.spec.schedule import GPIPE, ONE_F_ONE_B, SCHEDULES, Action, Pass, Schedule, schedule_named
from galvatron.core.spec.strategy import (
    Axis,
    Digit,
    Form,
    Kind,
    Layout,
    Strategy,
    by_digits,
    degree_of,
    gathered_digits,
    lines_up,
    prime_factors,
)

__all__ = [
    "GPIPE",
    "ONE_F_ONE_B",
    "SCHEDULES",
    "Action",
    "Attention",
    "Axis",
    "Cluster",
    "Collective",
    "Device",
    "Digit",
    "Form",
    "Kind",
    "LayerMemory",
    "LayerSpec",
    "LayerTime",
    "Layout",
    "Level",
    "Link",
    "MeasuredGroup",
    "ModelProfile",
    "ModelSpec",
    "Pass",
    "Precision",
    "Schedule",
    "Strategy",
    "TensorParallel",
    "Training",
    "by_digits",
    "degree_of",
    "gathered_digits",
    "lines_up",
    "prime_factors",
    "schedule_named",
]
