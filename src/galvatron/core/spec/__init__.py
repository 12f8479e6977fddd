"""Facts: models, clusters, strategies, schedules, optimizers, profiles. Imports nothing of the package but errors."""

from galvatron.core.spec.cluster import Cluster, Collective, Device, Level, Link, MeasuredGroup
from galvatron.core.spec.model import Attention, LayerSpec, ModelSpec, Precision, TensorParallel, Training
from galvatron.core.spec.optimizer import ADAMW, GRADIENT_BYTES, OPTIMIZERS, SGD, OptimizerSpec, optimizer_named
from galvatron.core.spec.profile import LayerMemory, LayerTime, ModelProfile
from galvatron.core.spec.schedule import GPIPE, ONE_F_ONE_B, SCHEDULES, Action, Pass, Schedule, schedule_named
from galvatron.core.spec.strategy import (
    Axis,
    Factor,
    Factors,
    Kind,
    Layout,
    Strategy,
    degree_of,
    factor_by_factor,
    gathered_factors,
    lines_up,
    prime_factors,
)
from galvatron.core.spec.switches import DENSE_KINDS, LAYER_SWITCHES, SWITCHES, Switch, SwitchChoices, Switches

__all__ = [
    "ADAMW",
    "DENSE_KINDS",
    "GPIPE",
    "GRADIENT_BYTES",
    "LAYER_SWITCHES",
    "ONE_F_ONE_B",
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "SWITCHES",
    "Action",
    "Attention",
    "Axis",
    "Cluster",
    "Collective",
    "Device",
    "Factor",
    "Factors",
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
    "OptimizerSpec",
    "Pass",
    "Precision",
    "Schedule",
    "Strategy",
    "Switch",
    "SwitchChoices",
    "Switches",
    "TensorParallel",
    "Training",
    "degree_of",
    "factor_by_factor",
    "gathered_factors",
    "lines_up",
    "optimizer_named",
    "prime_factors",
    "schedule_named",
]
