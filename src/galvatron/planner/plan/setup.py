"""From what a user says (names, sizes as text, switches left open) to a request.

One place decides every default, for the command line and for Python alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from galvatron.core.errors import InvalidInput
from galvatron.core.files.nodes import linked
from galvatron.core.spec import (
    ADAMW,
    GPIPE,
    ONE_F_ONE_B,
    SWITCHES,
    Attention,
    Cluster,
    Device,
    Kind,
    ModelSpec,
    Precision,
    Schedule,
    Switches,
    Training,
    optimizer_named,
    schedule_named,
)
from galvatron.core.spec.limits import Limits
from galvatron.core.spec.tuning import ALL_LINEAR, Lora
from galvatron.core.units import parse_bytes, parse_count
from galvatron.families import load_cluster, load_model
from galvatron.planner.cost import GALVATRON, PAPER_SYSTEMS
from galvatron.planner.plan.described import reject_other_training, reject_tuning, reject_uncompiled
from galvatron.planner.plan.limiting import parse_forbid, parse_pins
from galvatron.planner.plan.options import Setup, checked_setup
from galvatron.planner.plan.paper import PAPER_MICRO_BATCHES, paper_precision, paper_stages_a_micro_batch
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.profiled import as_profiled, profile_for
from galvatron.planner.search import CutRule
from galvatron.planner.space import PAPER, default_switches, space_named

__all__ = ["BEST", "Setup", "Source", "cluster_for", "request_for", "training_of", "with_adapters"]

Source = str | Path | dict[str, Any]
"""What names a model: a preset's name, a file or folder, or the content of a Hugging Face configuration."""

BEST = "best"
"""In place of a batch: the best of all that are worth a search, however many tokens."""
_PAPER_STEP = 8
_MOST_IMBALANCE = 1000
_LEAST_TYPED = 10**6
"""Bytes of a budget that somebody means who types no unit."""
_Choice = TypeVar("_Choice", bound=StrEnum)


def request_for(
    model: Source | ModelSpec,
    cluster: str | Path | Cluster,
    setup: Setup,
    load: Callable[[Source, Training], ModelSpec] = load_model,
) -> Request:
    """The request a user means. Raises :class:`InvalidInput` for what cannot be meant.

    ``load``: how a model's facts are found; the default knows what can be counted without torch.
    """
    setup = checked_setup(setup)
    paper = setup.get("paper", False)
    if paper:
        _reject_contradictions(setup)
    _reject_unusable_switches(setup)
    cluster = cluster_for(cluster, setup)
    if setup.get("offload") and not cluster.device.offloads:
        raise InvalidInput(
            f"--offload needs the link to the host, of which cluster {cluster.name!r} says nothing; give its file "
            "device.host_bandwidth and device.host_memory, or drop --offload"
        )
    training = training_of(setup, cluster.device)
    cluster.device.flops_per_s(training.precision)  # says at once when the device lacks it
    if isinstance(model, ModelSpec):
        reject_tuning(training, model)
        reject_other_training(setup, model)
    known = model if isinstance(model, ModelSpec) else load(model, training)
    reject_uncompiled(setup, known)
    seen = known.training.image_size if known.training.image_tokens is not None else None
    if training.image_size is not None and seen != training.image_size:
        raise InvalidInput(
            f"image-size: {training.image_size} given, but {known.name} reads no images beside text, or was described "
            "without; leave it out, or describe the model with a batch that has images"
        )
    # Its layers' sizes do not depend on the one. They may be those of layers that are not compiled, which save more.
    optimizer = training.optimizer if setup.get("optimizer") is not None else known.training.optimizer
    compiled = training.compile or known.training.compile
    model = replace(known, training=replace(known.training, optimizer=optimizer, compile=compiled))
    if training.float8:
        _check_float8(model, cluster)
    if setup.get("expert_imbalance") is not None:
        model = _imbalanced(model, setup["expert_imbalance"])
    memory, batch_step = setup.get("memory"), setup.get("batch_step")
    batch = _batch(setup, model, cluster)
    most = setup.get("max_micro_batches")
    profile = profile_for(setup, model, cluster)
    return Request(
        model=model,
        cluster=as_profiled(cluster, profile),
        memory_bytes=None if memory is None else _budget(memory),
        batch=batch,
        batch_step=_PAPER_STEP if paper and batch is batch_step is None else batch_step,
        max_batch=setup.get("max_batch"),
        time_limit_s=setup.get("time_limit"),
        any_tokens=paper or setup.get("batch") == BEST,
        space=_space(setup),
        switches=_switches(setup, model, cluster),
        schedule=_schedule(setup),
        cuts=_chosen(CutRule, setup.get("cuts"), "cuts", CutRule.MEMORY if paper else CutRule.EXACT),
        conventions=PAPER_SYSTEMS if paper else GALVATRON,
        profile=profile,
        max_micro_batches=PAPER_MICRO_BATCHES if paper and most is None else most,
        stages_a_micro_batch=paper_stages_a_micro_batch(cluster.devices) if paper and most is None else None,
        limits=_limits(setup),
    )


def cluster_for(given: str | Path | Cluster, setup: Setup) -> Cluster:
    """The cluster asked for. In the paper's setting a preset has no margin for the allocator and no known peak: the
    paper counts what is reserved only."""
    devices, node_link = setup.get("devices"), setup.get("node_link")
    if not isinstance(given, str | Path | Cluster):
        raise InvalidInput(
            f"cluster: {given!r} given; expected a preset's name ('galvatron clusters'), the path of a .toml file, or "
            "auto to measure this machine"
        )
    if not isinstance(given, Cluster):
        cluster = load_cluster(given, devices=devices, node_link=node_link)
        if not setup.get("paper") or Path(given).suffix == ".toml":
            return cluster
        device = replace(cluster.device, fp32_peak_flops_per_s=None, bf16_peak_flops_per_s=None)
        return replace(cluster, fragmentation=0.0, device=device)
    given = given if devices is None else given.shrunk(devices)
    return given if node_link is None else linked(given, node_link)


def _batch(setup: Setup, model: ModelSpec, cluster: Cluster) -> int | None:
    """The batch asked for, in samples; None: it is searched."""
    given, tokens = setup.get("batch"), setup.get("batch_tokens")
    if tokens is not None:
        other = next((name for name in ("batch", "batch_step", "max_batch") if setup.get(name) is not None), None)
        if other is not None:
            raise InvalidInput(f"batch-tokens and {other.replace('_', '-')} contradict each other; give one of them")
        return _samples(parse_count(tokens, where="batch-tokens"), model, cluster.devices)
    if given is None or given == BEST:
        return None
    try:
        return int(given)
    except ValueError:
        raise InvalidInput(f"batch: {given!r} given; expected a whole number of samples, or {BEST}") from None


def _samples(tokens: int, model: ModelSpec, devices: int) -> int:
    """So many tokens as samples: a multiple of the devices where there are enough, else a power of two, so that they
    divide well."""
    length = model.training.sequence_length
    if length is None:
        raise InvalidInput(f"batch-tokens: {tokens} given, but samples of {model.name} have no length; give --batch")
    if tokens < length:
        raise InvalidInput(
            f"batch-tokens: {tokens} given, but one sample of {model.name} has {length} tokens; give more, or a "
            "--sequence-length"
        )
    samples = tokens / length
    return round(samples / devices) * devices if samples >= devices else 2 ** round(math.log2(samples))


def _limits(setup: Setup) -> Limits | None:
    """What a user rules out; None: nothing."""
    limits = Limits(
        pins=parse_pins(setup.get("pin")),
        forbid=parse_forbid(setup.get("forbid")),
        pipeline_degree=setup.get("pipeline"),
        max_micro_batch=setup.get("max_micro_batch"),
    )
    return limits or None


def _check_float8(model: ModelSpec, cluster: Cluster) -> None:
    """Whether it can be meant: on such devices, in such a precision, for such a model."""
    training = model.training
    if cluster.device.float8_flops_per_s is None:
        raise InvalidInput(
            f"float8: asked for, but device {cluster.device.name!r} has none that is known; drop --float8, or say the "
            "rate of its products in the cluster file (float8 = …)"
        )
    if training.precision is not Precision.BF16:
        raise InvalidInput(f"float8: asked for in {training.precision}; it goes with --precision bf16 alone")
    if training.tunes:
        raise InvalidInput(
            "float8: asked for with frozen parameters or adapters, which it is not for; drop one of the two"
        )
    if all(kind.float8 is None for kind in model.kinds):
        raise InvalidInput(
            f"float8: no layer of {model.name} has linear layers that it is known to pay for (Llama's, with more than "
            "1024 inputs and 2048 outputs); drop --float8"
        )


def _lora(setup: Setup) -> Lora | None:
    rank, alpha = setup.get("lora"), setup.get("lora_alpha")
    targets, full = setup.get("lora_targets"), setup.get("lora_full")
    if rank is None:
        for name in ("lora_alpha", "lora_targets", "lora_full"):
            if setup.get(name) is not None:
                raise InvalidInput(f"{name.replace('_', '-')}: given without a rank; give --lora too, or drop it")
        return None
    for name in ("freeze", "train_only"):
        if setup.get(name):
            raise InvalidInput(
                f"{name.replace('_', '-')}: given together with --lora, which freezes all but the adapters; drop it "
                "(--lora-full names what else trains)"
            )
    return Lora(
        rank=rank,
        alpha=2.0 * rank if alpha is None else float(alpha),
        targets=_patterns(targets) if targets is not None else (ALL_LINEAR,),
        full=None if full is None else _patterns(full),
    )


def with_adapters(setup: Setup, lora: Lora) -> Setup:
    """The setup, which then asks for adapters that are there already. Raises :class:`InvalidInput` if it asks for
    others."""
    said: Setup = {"lora": lora.rank, "lora_alpha": lora.alpha, "lora_targets": ",".join(lora.targets)}
    if lora.full is not None:
        said["lora_full"] = ",".join(lora.full)
    for name, own in said.items():
        if setup.get(name) not in (None, own):
            raise InvalidInput(
                f"{name.replace('_', '-')}: {setup.get(name)} given, but the adapters are there already, with "
                f"{own or 'none'}; drop it"
            )
    return {**setup, **said}


def _patterns(given: str | None) -> tuple[str, ...]:
    return tuple(pattern.strip() for pattern in (given or "").split(",") if pattern.strip())


def _imbalanced(model: ModelSpec, imbalance: float | None) -> ModelSpec:
    """The model with so much more for the busiest device where EP divides its experts."""
    given = f"expert-imbalance: {imbalance} given"
    if not isinstance(imbalance, int | float) or not 1 <= imbalance <= _MOST_IMBALANCE:
        raise InvalidInput(
            f"{given}; expected the tokens of the busiest device over the mean, from 1 to {_MOST_IMBALANCE}"
        )
    if not model.has_experts:
        raise InvalidInput(f"{given}, but {model.name} has no experts; leave it out")
    layers = tuple(
        layer if layer.experts is None else replace(layer, experts=replace(layer.experts, imbalance=float(imbalance)))
        for layer in model.layers
    )
    return replace(model, layers=layers)


def _space(setup: Setup) -> str:
    return setup.get("space", "full")


def _reject_unusable_switches(setup: Setup) -> None:
    """An extension asked for in a space that has no use for it would be dropped without a word."""
    kinds = space_named(_space(setup)).kinds
    for switch in SWITCHES:
        if setup.get(switch.name) and not switch.space_needs <= kinds:
            needed = [kind.upper() for kind in Kind if kind in switch.space_needs]
            kinds_needed = f"both {' and '.join(needed)}" if len(needed) > 1 else needed[0]
            raise InvalidInput(
                f"--{switch.option} needs {kinds_needed}, which space {_space(setup)!r} does not hold; "
                f"use --space full or drop --{switch.option}"
            )


def _reject_contradictions(setup: Setup) -> None:
    """``paper`` fixes what the paper fixed; asking for something else at the same time is a mistake."""
    fixed = {
        "schedule": (GPIPE.name,),
        "precision": ("fp32", "tf32"),
        "attention": ("eager", "paper"),
        "optimizer": (ADAMW.name,),
    }
    for name, allowed in fixed.items():
        given = setup.get(name)
        if given is not None and given not in allowed:
            raise InvalidInput(
                f"--paper means {name} {allowed[0]}, but {name} {given!r} is asked for; drop one of the two"
            )
    for switch in SWITCHES:
        if setup.get(switch.name):
            raise InvalidInput(
                f"--paper excludes the extension {switch.option}, but it is asked for; drop one of the two"
            )


def training_of(setup: Setup, device: Device | None = None) -> Training:
    """How the model is trained; what the setup does not say is as usual on the device."""
    usual = Precision.FP32 if device is None else device.precision
    chosen = _chosen(Precision, setup.get("precision"), "precision", usual)
    compiled = setup.get("compile")
    attention = _chosen(Attention, setup.get("attention"), "attention", Attention.FUSED)
    paper, optimizer = setup.get("paper", False), setup.get("optimizer")
    return Training(
        precision=paper_precision(setup.get("precision"), device) if paper else chosen,
        attention=Attention.PAPER if paper else attention,
        dropout=setup.get("dropout"),
        sequence_length=setup.get("sequence_length"),
        image_size=setup.get("image_size"),
        optimizer=ADAMW.name if optimizer is None else optimizer_named(optimizer).name,
        compile=(device is not None and device.compiles and not paper) if compiled is None else compiled,
        float8=bool(setup.get("float8")),
        freeze=_patterns(setup.get("freeze")),
        train_only=_patterns(setup.get("train_only")),
        lora=_lora(setup),
    )


def _budget(memory: str | int) -> int:
    """Bytes. A text of a small number without a unit is a unit forgotten."""
    budget = parse_bytes(memory, where="memory")
    if isinstance(memory, str) and 0 < budget < _LEAST_TYPED and memory.strip().isdecimal():
        raise InvalidInput(f"memory: {memory} given, which is {budget} bytes; say the unit: {memory}GB or {memory}GiB")
    return budget


def _schedule(setup: Setup) -> Schedule:
    name = setup.get("schedule")
    if setup.get("paper"):
        return GPIPE
    return ONE_F_ONE_B if name is None else schedule_named(name)


def _switches(setup: Setup, model: ModelSpec, cluster: Cluster) -> Switches:
    """The extensions: as said, else by default; in the paper's setting none. Who wants no recompute gets none of its
    grades either, unless asked for."""
    length = model.training.sequence_length
    default = PAPER if setup.get("paper") else default_switches(cluster, length)
    if setup.get("context_parallel") and not model.divisible:
        raise InvalidInput(
            f"--context-parallel: asked for, but sequences of {model.name} cannot be divided over devices; 'galvatron "
            "check MODEL' says why; leave it out"
        )
    asked = setup.get("context_parallel")
    if asked is not None:
        default = replace(default, context_parallel=asked, zero3=asked)
    for name in ("zero3", "context_orders"):
        if setup.get(name) and not (default.context_parallel and model.divisible):
            option = f"--{name.replace('_', '-')}"
            raise InvalidInput(
                f"{option} is for ranks that divide a sequence (Ring, Ulysses), which are not searched here; add "
                f"--context-parallel, or drop {option}"
            )
    if setup.get("recompute") is False:
        default = replace(default, selective_recompute=False, recompute_but_attention=False)
    said = {name: bool(setup.get(name)) for name in (switch.name for switch in SWITCHES) if setup.get(name) is not None}
    return replace(default, **said)


def _chosen(kind: type[_Choice], given: str | None, name: str, default: _Choice) -> _Choice:
    if given is None:
        return default
    try:
        return kind(given)
    except ValueError:
        raise InvalidInput(f"{name}: {given!r} is unknown; choose one of {', '.join(kind)}") from None
