"""``profile_model``: the layers of a model on this machine's devices, measured, as the planner's figures.

Needs no torch in the caller's process.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.core.files.profiles import dump_profile
from galvatron.core.spec import ADAMW, Cluster, LayerGrade, LayerMemory, LayerSpec, LayerTime, ModelProfile, ModelSpec
from galvatron.core.units import format_seconds
from galvatron.families import load_profile
from galvatron.measure import cache
from galvatron.measure.cache import provenance
from galvatron.measure.figures import NOISY, Line, fit_line, quality_of, reading_of
from galvatron.measure.layer_jobs.job import LayerJob
from galvatron.measure.layer_jobs.probes import (
    LayerBytes,
    LayerFindings,
    LayerProbe,
    Variant,
    groups_of,
    probes_of,
    variants_of,
)
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.space import divisors
from galvatron.processes.helper import measured, under_torchrun
from galvatron.processes.job import Progress
from galvatron.processes.virtual import virtual_devices

__all__ = ["Effort", "profile_model", "profile_of"]

_LOG = logging.getLogger(__name__)
_CLEARLY = 1.5
"""Factor from which on times are held to differ."""
_LEAST_S = 1e-9
_UNSEEN = 0.02
"""Of a GPU's memory, besides what its allocator lost in one plan: what others lose more, and what predictions are off
by (docs/evidence.md)."""
_REHEARSED_ROOM = 0.15
"""Of a GPU's memory that the plan in which it is seen leaves free: enough for it to run, whatever is lost."""
_REHEARSED_S = 2.0
"""An iteration of the plan in which it is seen: longer ones show no more."""
_PLANNING_S = 2.0
_NAMED = 5
_TOLD = 0.01
"""Of a forward: smaller differences are noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How thoroughly layers are measured."""

    rounds: int = 5
    """How many times each."""
    limit_s: float | None = 900.0
    """After so many seconds whole layers are still measured, but nothing else; None: there is no limit."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise InvalidInput(f"rounds: {self.rounds} given; expected at least 2, so that they can be compared")
        if self.limit_s is not None and not self.limit_s > 0:
            raise InvalidInput(f"time-limit: {self.limit_s:g} s given; expected more than 0, such as 10min")


def profile_model(
    model: ModelSpec,
    cluster: Cluster,
    *,
    tp_degrees: Sequence[int] | None = None,
    fresh: bool = False,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> ModelProfile:
    """Measure each kind of layer of a model: forward and backward over several batch sizes and degrees of TP, what it
    saves for backward, and what backward takes on top.

    ``cluster``: the devices it is for, this machine's being of their kind; where they share cores or a GPU, as many
    processes measure at once. ``tp_degrees``: None: all that the cluster allows. What was measured before under the
    same circumstances is taken from the cache, unless it is to be ``fresh``.
    """
    if model.config is None:
        raise InvalidInput(
            f"model {model.name!r} is described by figures alone, so its layers cannot be run and measured; give a "
            "preset or a Hugging Face configuration"
        )
    effort = effort or Effort()
    degrees = _degrees(cluster, tp_degrees)
    model = model.untuned()  # what is frozen follows from what the stock model's layers take
    # No layer depends on the optimizer; what float8 changes is counted.
    model = replace(
        model,
        layers=tuple(replace(layer, float8=None) for layer in model.layers),
        training=replace(model.training, optimizer=ADAMW.name, float8=False),
    )
    probes = probes_of(model, cluster, variants_of(model, degrees, cluster.devices))
    if not probes:
        raise InvalidInput(
            f"model {model.name!r}: two samples of {model.training.sequence_length} tokens do not fit a device in any "
            "layer, so none can be measured; plan with a cluster file and no profile, which counts them"
        )
    for kind in model.kinds:
        if all(probe.variant.layer != kind.name for probe in probes):
            _LOG.warning(
                "layer %r is not measured: samples of %s tokens take too much of a device, however they are divided; "
                "it is counted, which may be far off", kind.name, model.training.sequence_length,
            )  # fmt: skip
    job = LayerJob(
        model=model,
        groups=groups_of(probes, model, cluster),
        devices=cluster.devices if cluster.compute_contention > 1 or virtual_devices() is not None else 1,
        rounds=effort.rounds,
        tensor_bytes=max(cluster.device.memory_bytes - cluster.reserved_bytes, 1),
        limit_s=effort.limit_s,
    )
    key = cache.key_of(
        model=model.digest, config=model.config, degrees=degrees, samples=[probe.size for probe in job.probes],
        devices=job.devices, rounds=effort.rounds,
        rehearsed=cluster.device.memory_bytes if cluster.fragmentation else None,
    )  # fmt: skip
    whole, partial = cache.cached_file("model", key), cache.cached_file("model", f"{key}-{effort.limit_s}")
    for kept in (whole, partial):
        # Under torchrun machines might differ in what they have kept, and wait for each other for ever.
        if kept.exists() and not fresh and not under_torchrun():
            known = load_profile(kept)
            cache.warn_if_noisy(known.source)
            if kept == partial:
                _LOG.warning(
                    "layers were measured in part, with a limit of %s; 'galvatron profile model' has --time-limit",
                    format_seconds(effort.limit_s or 0),
                )
            return known
    job = replace(job, plan=_plan_to_rehearse(model, cluster))
    findings = measured(job, progress)
    assert isinstance(findings, LayerFindings)
    if findings.left_out:
        _LOG.warning("%s", _left_out(findings.left_out, effort.limit_s or 0))
    profile = profile_of(model, findings)
    cache.keep(partial if findings.left_out else whole, dump_profile(profile))
    return profile


def _left_out(variants: Sequence[Variant], limit_s: float) -> str:
    named = [f"{variant.layer} {variant.strategy}" for variant in variants[:_NAMED]]
    more = f" and {len(variants) - _NAMED} more" if len(variants) > _NAMED else ""
    return (
        f"the time limit of {format_seconds(limit_s)} was over before these were measured: "
        f"{', '.join(named)}{more}; they are priced by what is known of the layers that were, which may be far off; "
        "'galvatron profile model' has --time-limit"
    )


def _plan_to_rehearse(model: ModelSpec, cluster: Cluster) -> Plan | None:
    """A plan of the kind that will be chosen, priced by counts; None where no allocator loses memory."""
    if not cluster.fragmentation:
        return None
    request = Request(model=model, cluster=replace(cluster, fragmentation=_REHEARSED_ROOM), time_limit_s=_PLANNING_S)
    plan = try_plan(request)
    if plan is None or plan.iteration_s <= _REHEARSED_S:
        return plan
    least = request.batches[0]
    most = max(least, int(plan.batch * _REHEARSED_S / plan.iteration_s))
    return try_plan(replace(request, batch_step=least, max_batch=most)) or plan


def _degrees(cluster: Cluster, asked: Sequence[int] | None) -> list[int]:
    possible = divisors(cluster.devices)
    for degree in asked or ():
        if degree not in possible:
            raise InvalidInput(
                f"tp-degrees: {degree} given; expected divisors of the {cluster.devices} devices of {cluster.name}: "
                f"{', '.join(map(str, possible))}"
            )
    return sorted({1, *(possible if asked is None else asked)})


def profile_of(model: ModelSpec, findings: LayerFindings) -> ModelProfile:
    """The planner's figures from what was measured."""
    parts = [{probe: reading_of(blocks, part) for probe, blocks in findings.blocks.items()} for part in (0, 1)]
    quality = quality_of(
        (reading for part in parts for reading in part.values()),
        max(len(blocks) for blocks in findings.blocks.values()),
    )
    if quality.spread > NOISY:
        _LOG.warning("the machine was busy with other things while it was measured: %s; measure again", quality)
    variants = dict.fromkeys(probe.variant for probe in findings.blocks if probe.variant == _plain(probe.variant))
    forward, backward = (
        {probe: findings.sustained * reading.seconds for probe, reading in part.items()} for part in parts
    )
    kinds = {kind.name: kind for kind in model.kinds}
    return ModelProfile(
        name=f"{model.name} on {findings.device}"[:100],
        times=tuple(_time(variant, forward, backward) for variant in variants),
        memory=tuple(
            _memory(variant, weighed, kinds[variant.layer])
            for variant, weighed in findings.memory.items()
            if not variant.grade
        ),
        grades=tuple(
            _grade(variant, _memory(variant, weighed, kinds[variant.layer]), forward, backward)
            for variant, weighed in findings.memory.items()
            if variant.grade and any(probe.variant == _plain(variant) for probe in forward)
        ),
        source=provenance(findings.device, quality),
        fragmentation=None if findings.lost is None else _rounded(1 - (1 - findings.lost) * (1 - _UNSEEN)),
        layers_digest=model.layers_digest,
    )


def _time(variant: Variant, forward: dict[LayerProbe, float], backward: dict[LayerProbe, float]) -> LayerTime:
    (forward_line, forward_least_s), (backward_line, backward_least_s) = (
        _line_and_least([(probe.size, seconds) for probe, seconds in part.items() if probe.variant == variant])
        for part in (forward, backward)
    )
    lines = (forward_line, backward_line)
    # A layer that does next to nothing for each sample still has a ratio of its passes.
    slopes = [max(line.slope, line.fixed * 1e-3, _LEAST_S) for line in lines]
    return LayerTime(
        layer=variant.layer,
        forward_s=_rounded(slopes[0]),
        backward_ratio=_rounded(min(max(slopes[1] / slopes[0], 0.01), 10_000)),
        forward_fixed_s=_rounded(lines[0].fixed),
        backward_fixed_s=_rounded(lines[1].fixed),
        forward_least_s=_rounded(forward_least_s),
        backward_least_s=_rounded(backward_least_s),
        forward_sharded_s=_sharding_s(variant, forward),
        backward_sharded_s=_sharding_s(variant, backward),
        recompute_s=_recompute_s(variant, forward, backward),
        tp=variant.tp,
        sequence_parallel=variant.sequence_parallel,
        ep=variant.ep,
        fused_loss=variant.fused_loss,
    )


def _line_and_least(points: Sequence[tuple[float, float]]) -> tuple[Line, float]:
    """Where few samples take what starting their kernels does, however few they are, the line goes through the others
    and that time is the least; else it goes through all."""
    least_s = min(seconds for _, seconds in points)
    longer = [(samples, seconds) for samples, seconds in points if seconds > _CLEARLY * least_s]
    if len(longer) > 1:
        line = fit_line(longer)
        if least_s > _CLEARLY * line.at(min(samples for samples, _ in points)):
            return line, least_s
    return _line(points), 0.0


def _line(points: Sequence[tuple[float, float]]) -> Line:
    """Where one long sample was measured alone, nothing is fixed."""
    if len(points) > 1:
        return fit_line(points)
    ((samples, seconds),) = points
    return Line(0.0, seconds / samples)


def _plain(variant: Variant) -> Variant:
    return replace(variant, sharded=False, recompute=False, grade="")


def _sharding_s(variant: Variant, seconds: dict[LayerProbe, float]) -> float:
    """What the layer takes more with its parameters sharded. Measured without TP, whose ranks have less to copy."""
    return _typical(
        seconds[probe] - seconds[replace(probe, variant=_plain(probe.variant))]
        for probe in seconds
        if probe.variant.sharded and probe.variant.layer == variant.layer
        if replace(probe, variant=_plain(probe.variant)) in seconds
    )


def _recompute_s(variant: Variant, forward: dict[LayerProbe, float], backward: dict[LayerProbe, float]) -> float:
    """What both passes of a recomputed layer take more than a forward, a forward and a backward."""
    pairs = [
        (probe, replace(probe, variant=_plain(probe.variant)))
        for probe in forward
        if probe.variant.recompute and probe.variant.layer == variant.layer
    ]
    return _typical(
        forward[re] + backward[re] - 2 * forward[plain] - backward[plain] for re, plain in pairs if plain in forward
    )


def _grade(
    variant: Variant,
    kept: LayerMemory,
    forward: dict[LayerProbe, float],
    backward: dict[LayerProbe, float],
) -> LayerGrade:
    """What both passes of a layer recomputed in part take more than its passes without: by samples, and besides."""
    pairs = [(probe, replace(probe, variant=_plain(variant))) for probe in forward if probe.variant == variant]
    more = [
        (
            probe.size,
            max(forward[probe] + backward[probe] - forward[plain] - backward[plain], _TOLD * forward[plain]),
        )
        for probe, plain in pairs
        if plain in forward
    ]
    points = [(probe.size, forward[plain]) for probe, plain in pairs if plain in forward]
    whole, _ = _line_and_least(points)
    line = _line(more)
    return LayerGrade(
        layer=variant.layer,
        grade=variant.grade,
        share=_rounded(min(max(line.slope, 0.0) / max(whole.slope, _LEAST_S), 100.0)),
        fixed_s=_rounded(max(line.fixed, 0.0)),
        activation_bytes=kept.activation_bytes,
    )


def _typical(differences: Iterable[float]) -> float:
    known = list(differences)
    return _rounded(max(statistics.median(known), 0.0)) if known else 0.0


def _memory(variant: Variant, weighed: Sequence[LayerBytes], kind: LayerSpec) -> LayerMemory:
    few, many = weighed
    more = many.samples - few.samples
    saved = (many.saved - few.saved) / more - _dividing_bytes(variant, kind)
    return LayerMemory(
        layer=variant.layer,
        activation_bytes=int(max(saved, 0)),
        transient_bytes=int(max(many.transient - few.transient, 0) / more),
        tp=variant.tp,
        sequence_parallel=variant.sequence_parallel,
    )


def _dividing_bytes(variant: Variant, kind: LayerSpec) -> float:
    """What a layer saves of one sample only because it is divided, which the planner adds where it is."""
    context = kind.context
    if variant.ulysses == 1 or context is None:
        return 0.0
    split = variant.tp if kind.tensor_parallel is not None else 1
    exchanged = context.query_bytes + context.key_value_bytes if variant.grade else 0
    return (context.query_bytes + exchanged) / split


def _rounded(value: float) -> float:
    """To four digits: what was measured is no better, and people read it."""
    return float(f"{value:.4g}")
