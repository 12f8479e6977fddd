"""From what a user says (names, sizes as text, switches left open) to a request.

One place decides every default, for the command line and for Python alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import (
    ADAMW,
    GPIPE,
    ONE_F_ONE_B,
    Attention,
    Cluster,
    Kind,
    ModelProfile,
    ModelSpec,
    Precision,
    Schedule,
    Training,
    optimizer_named,
    schedule_named,
)
from galvatron.core.units import parse_bytes
from galvatron.families import load_cluster, load_model, load_profile, paper_profile
from galvatron.planner.cost import GALVATRON, PAPER_SYSTEMS
from galvatron.planner.plan.planner import Request
from galvatron.planner.search import CutRule
from galvatron.planner.space import EXTENDED, PAPER, Switches, space_named

__all__ = ["PAPER_MICRO_BATCHES", "Options", "Setup", "request_for", "training_of"]

PAPER_MICRO_BATCHES = 4
"""Most micro-batches in the paper's setting (fitted to its table): it tuned them by hand and does not say how many."""

_PAPER_STEP = 8
_Choice = TypeVar("_Choice", bound=StrEnum)


class Options(TypedDict, total=False):
    """The fields of a setup as keywords, for type checkers."""

    memory: str | int | None
    batch: int | None
    batch_step: int | None
    max_batch: int | None
    max_micro_batches: int | None
    space: str
    schedule: str | None
    cuts: str | None
    precision: str | None
    attention: str | None
    dropout: bool | None
    sequence_length: int | None
    optimizer: str | None
    profile: str | Path | None
    recompute: bool | None
    sequence_parallel: bool | None
    zero2: bool | None
    hybrid_sharding: bool | None
    accumulation: bool | None
    paper: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What may be said about a plan; None: not said."""

    memory: str | int | None = None
    batch: int | None = None
    batch_step: int | None = None
    max_batch: int | None = None
    max_micro_batches: int | None = None
    space: str = "full"
    schedule: str | None = None
    cuts: str | None = None
    precision: str | None = None
    attention: str | None = None
    dropout: bool | None = None
    sequence_length: int | None = None
    optimizer: str | None = None
    profile: str | Path | None = None
    recompute: bool | None = None
    sequence_parallel: bool | None = None
    zero2: bool | None = None
    hybrid_sharding: bool | None = None
    accumulation: bool | None = None
    paper: bool = False
    """The paper's setting: GPipe, fp32, its models' attention, its space and pruning, the systems of its time; unless
    said otherwise also its guideline for cuts (by memory) and few micro-batches."""


def request_for(model: str | Path | ModelSpec | dict[str, Any], cluster: str | Path | Cluster, setup: Setup) -> Request:
    """The request a user means; a dictionary is a model's configuration. Raises :class:`InvalidInput` for what cannot
    be meant."""
    if setup.paper:
        _reject_contradictions(setup)
    _reject_unusable_switches(setup)
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    training = training_of(setup, cluster.device.precision)
    cluster.device.flops_per_s(training.precision)  # says at once when the device lacks it
    if not isinstance(model, ModelSpec):
        model = load_model(model, training)
    elif setup.optimizer is not None:  # its layers' sizes do not depend on it
        model = replace(model, training=replace(model.training, optimizer=training.optimizer))
    return Request(
        model=model,
        cluster=cluster,
        memory_bytes=None if setup.memory is None else parse_bytes(setup.memory, where="memory"),
        batch=setup.batch,
        batch_step=_PAPER_STEP if setup.paper and setup.batch is setup.batch_step is None else setup.batch_step,
        max_batch=setup.max_batch,
        space=setup.space,
        switches=_switches(setup, cluster),
        schedule=_schedule(setup),
        cuts=_chosen(CutRule, setup.cuts, "cuts", CutRule.MEMORY if setup.paper else CutRule.EXACT),
        conventions=PAPER_SYSTEMS if setup.paper else GALVATRON,
        profile=_profile(setup, model, cluster),
        max_micro_batches=PAPER_MICRO_BATCHES
        if setup.paper and setup.max_micro_batches is None
        else setup.max_micro_batches,
    )


def _reject_unusable_switches(setup: Setup) -> None:
    """An extension asked for in a space that has no use for it would be dropped without a word."""
    kinds = space_named(setup.space).kinds
    for name, needed in (("zero2", {Kind.DP, Kind.SDP}), ("hybrid_sharding", {Kind.DP, Kind.SDP})):
        if getattr(setup, name) and not needed <= kinds:
            option = name.replace("_", "-")
            raise InvalidInput(
                f"--{option} asks for sharding beside DP, which space {setup.space!r} does not hold; use --space full "
                f"or drop --{option}"
            )


def _reject_contradictions(setup: Setup) -> None:
    """``paper`` fixes what the paper fixed; asking for something else at the same time is a mistake."""
    fixed = {
        "schedule": (GPIPE.name,),
        "precision": ("fp32",),
        "attention": ("eager", "paper"),
        "optimizer": (ADAMW.name,),
    }
    for name, allowed in fixed.items():
        given = getattr(setup, name)
        if given is not None and given not in allowed:
            raise InvalidInput(
                f"--paper means {name} {allowed[0]}, but {name} {given!r} is asked for; drop one of the two"
            )
    for name in (field.name for field in fields(Switches)):
        if getattr(setup, name):
            option = name.replace("_", "-")
            raise InvalidInput(f"--paper excludes the extension {option}, but it is asked for; drop one of the two")


def training_of(setup: Setup, precision: Precision = Precision.FP32) -> Training:
    """How the model is trained; ``precision`` is used where the setup says none."""
    return Training(
        precision=Precision.FP32 if setup.paper else _chosen(Precision, setup.precision, "precision", precision),
        attention=Attention.PAPER if setup.paper else _chosen(Attention, setup.attention, "attention", Attention.FUSED),
        dropout=setup.dropout,
        sequence_length=setup.sequence_length,
        optimizer=ADAMW.name if setup.optimizer is None else optimizer_named(setup.optimizer).name,
    )


def _schedule(setup: Setup) -> Schedule:
    if setup.paper:
        return GPIPE
    return ONE_F_ONE_B if setup.schedule is None else schedule_named(setup.schedule)


def _switches(setup: Setup, cluster: Cluster) -> Switches:
    """All extensions unless told otherwise; hybrid sharding by default only where islands differ in speed."""
    default = PAPER if setup.paper else replace(EXTENDED, hybrid_sharding=cluster.has_uneven_links)
    said = {field.name: getattr(setup, field.name) for field in fields(Switches)}
    return replace(default, **{name: value for name, value in said.items() if value is not None})


def _profile(setup: Setup, model: ModelSpec, cluster: Cluster) -> ModelProfile | None:
    if setup.profile is not None:
        profile = load_profile(setup.profile)
        names = [kind.name for kind in model.kinds]
        if not any(profile.time_of(name) for name in names):
            raise InvalidInput(
                f"profile {profile.name!r} has times for none of the layers of {model.name} ({', '.join(names)}); "
                "give a profile of this model"
            )
        return profile
    return paper_profile(model, cluster) if setup.paper else None


def _chosen(kind: type[_Choice], given: str | None, name: str, default: _Choice) -> _Choice:
    if given is None:
        return default
    try:
        return kind(given)
    except ValueError:
        raise InvalidInput(f"{name}: {given!r} is unknown; choose one of {', '.join(kind)}") from None
