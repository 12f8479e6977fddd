"""Facts: models, clusters, strategies, profiles. Imports nothing of the package but errors."""

from galvatron.core.spec.cluster import Cluster, Collective, Device, Level, Link, MeasuredGroup
from galvatron.core.spec.model import Attention, LayerSpec, ModelSpec, Precision, TensorParallel, Training
from galvatron.core.spec.profile import LayerMemory, LayerTime, ModelProfile
from galvatron.core.spec.strategy import (
    Axis,
    Digit,
    Form,
    Kind,
    Layout,
    Strategy,
    by_digits,
    gathered_digits,
    lines_up,
    prime_factors,
)
from galvatron.core.spec.switches import LAYER_SWITCHES, SWITCHES, Switch, SwitchChoices, Switches

__all__ = [
    "LAYER_SWITCHES",
    "SWITCHES",
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
    "Precision",
    "Strategy",
    "Switch",
    "SwitchChoices",
    "Switches",
    "TensorParallel",
    "Training",
    "by_digits",
    "gathered_digits",
    "lines_up",
    "prime_factors",
]
