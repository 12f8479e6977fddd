"""``profile_model``: the layers of a model on this machine's devices, measured, as the planner's figures.

Needs no torch in the caller's process.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from galvatron.errors import InvalidInput
from galvatron.profiler import cache
from galvatron.profiler.figures import NOISY, Line, fit_line, quality_of, reading_of
from galvatron.profiler.layer_job import LayerBytes, LayerFindings, LayerJob, LayerProbe, Way
from galvatron.profiler.processes import Progress, measured, under_torchrun
from galvatron.profiler.provenance import provenance
from galvatron.space import divisors
from galvatron.spec import Cluster, LayerMemory, LayerTime, ModelProfile, ModelSpec
from galvatron.virtual import virtual_devices
from galvatron.zoo import load_profile
from galvatron.zoo.profile_files import dump_profile

__all__ = ["profile_model", "profile_of"]

_LOG = logging.getLogger(__name__)
_SAMPLES = (1, 2, 4, 8)
_LONGEST_S = 2.0
"""Of one forward and backward: larger numbers of samples are left out."""
_MEMORY_SHARE = 0.25
"""Of a device's memory, for what one layer saves of its samples: larger numbers of them are left out."""
_CLEARLY = 1.5
_LEAST_S = 1e-9


def profile_model(
    model: ModelSpec,
    cluster: Cluster,
    *,
    tp_degrees: Sequence[int] | None = None,
    fresh: bool = False,
    rounds: int = 5,
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
    if rounds < 2:
        raise InvalidInput(f"rounds: {rounds} given; expected at least 2, so that they can be compared")
    degrees = _degrees(cluster, tp_degrees)
    job = LayerJob(
        model=model,
        ways=_ways(model, degrees, cluster.devices),
        samples=_samples(model, cluster, max(degrees)),
        devices=cluster.devices if cluster.compute_contention > 1 or virtual_devices() is not None else 1,
        rounds=rounds,
    )
    key = cache.key_of(
        model=model.digest, config=model.config, degrees=degrees, samples=job.samples, devices=job.devices,
        rounds=rounds,
    )  # fmt: skip
    kept = cache.cached_file("model", key)
    # Under torchrun machines might differ in what they have kept, and wait for each other for ever.
    if kept.exists() and not fresh and not under_torchrun():
        return load_profile(kept)
    findings = measured(job, progress)
    assert isinstance(findings, LayerFindings)
    profile = profile_of(model, findings)
    cache.keep(kept, dump_profile(profile))
    return profile


def _degrees(cluster: Cluster, asked: Sequence[int] | None) -> list[int]:
    possible = divisors(cluster.devices)
    for degree in asked or ():
        if degree not in possible:
            raise InvalidInput(
                f"tp-degrees: {degree} given; expected divisors of the {cluster.devices} devices of {cluster.name}: "
                f"{', '.join(map(str, possible))}"
            )
    return sorted({1, *(possible if asked is None else asked)})


def _ways(model: ModelSpec, degrees: Sequence[int], devices: int) -> tuple[Way, ...]:
    """Every kind of layer whole, split as far as it can be, with its parameters sharded, and recomputed."""
    first = {layer.name: index for index, layer in reversed(list(enumerate(model.layers)))}
    other = [
        Way(
            layer=kind.name,
            index=first[kind.name],
            tp=1,
            sequence_parallel=False,
            sharded=sharded,
            recompute=not sharded,
        )
        for kind in model.kinds
        for sharded in (True, False)
        if not sharded or (devices > 1 and kind.parameters)
    ]
    split = [
        Way(layer=kind.name, index=first[kind.name], tp=degree, sequence_parallel=sequence)
        for kind in model.kinds
        for degree in degrees
        if degree == 1 or (kind.tensor_parallel is not None and kind.allows_tensor_parallel(degree))
        for sequence in (False, True)
        if not sequence or (degree > 1 and kind.allows_sequence_parallel(degree))
    ]
    return (*split, *other)


def _samples(model: ModelSpec, cluster: Cluster, tp: int) -> tuple[int, ...]:
    """Batch sizes that a layer does in a short time and that fit, with TP up to this degree; at least two, so that
    there is a line through them."""
    flops = 3 * max(kind.forward_flops for kind in model.kinds)
    one_s = flops / cluster.device.flops_per_s(model.training.precision)
    # Split layers are given so many times the samples (``LayerJob.counts``).
    one_bytes = max(1, *(kind.split_activation_bytes + tp * kind.replicated_activation_bytes for kind in model.kinds))
    most = min(_LONGEST_S / one_s, _MEMORY_SHARE * cluster.device.memory_bytes / one_bytes)
    few = tuple(count for count in _SAMPLES if count <= most)
    return few if len(few) > 1 else _SAMPLES[:2]


def profile_of(model: ModelSpec, findings: LayerFindings) -> ModelProfile:
    """The planner's figures from what was measured."""
    parts = [{probe: reading_of(blocks, part) for probe, blocks in findings.blocks.items()} for part in (0, 1)]
    quality = quality_of(
        (reading for part in parts for reading in part.values()),
        max(len(blocks) for blocks in findings.blocks.values()),
    )
    if quality.spread > NOISY:
        _LOG.warning("the machine was busy with other things while it was measured: %s; measure again", quality)
    ways = dict.fromkeys(probe.way for probe in findings.blocks if probe.way == _plain(probe.way))
    forward, backward = ({probe: reading.seconds for probe, reading in part.items()} for part in parts)
    return ModelProfile(
        name=f"{model.name} on {findings.device}"[:100],
        times=tuple(_time(way, forward, backward) for way in ways),
        memory=tuple(_memory(way, weighed) for way, weighed in findings.memory.items()),
        source=provenance(findings.device, quality),
    )


def _time(way: Way, forward: dict[LayerProbe, float], backward: dict[LayerProbe, float]) -> LayerTime:
    measured = [
        [(probe.samples, seconds) for probe, seconds in part.items() if probe.way == way]
        for part in (forward, backward)
    ]
    least = [min(seconds for _, seconds in points) for points in measured]
    lines = [_line(points, least_s) for points, least_s in zip(measured, least, strict=True)]
    # A layer that does next to nothing for each sample still has a ratio of its passes.
    slopes = [max(line.slope, line.fixed * 1e-3, _LEAST_S) for line in lines]
    return LayerTime(
        layer=way.layer,
        forward_s=_rounded(slopes[0]),
        backward_ratio=_rounded(min(max(slopes[1] / slopes[0], 0.01), 10_000)),
        forward_fixed_s=_rounded(lines[0].fixed),
        backward_fixed_s=_rounded(lines[1].fixed),
        forward_least_s=_rounded(least[0]),
        backward_least_s=_rounded(least[1]),
        forward_sharded_s=_sharding_s(way, forward),
        backward_sharded_s=_sharding_s(way, backward),
        recompute_s=_recompute_s(way, forward, backward),
        tp=way.tp,
        sequence_parallel=way.sequence_parallel,
    )


def _line(points: Sequence[tuple[int, float]], least_s: float) -> Line:
    """Through those that clearly take longer than the shortest: few samples may take what starting their kernels does,
    however few they are."""
    longer = [(samples, seconds) for samples, seconds in points if seconds > _CLEARLY * least_s]
    return fit_line(longer if len(longer) > 1 else points)


def _plain(way: Way) -> Way:
    return replace(way, sharded=False, recompute=False)


def _sharding_s(way: Way, seconds: dict[LayerProbe, float]) -> float:
    """What the layer takes more with its parameters sharded. Measured without TP, whose ranks have less to copy."""
    return _typical(
        seconds[probe] - seconds[replace(probe, way=_plain(probe.way))]
        for probe in seconds
        if probe.way.sharded and probe.way.layer == way.layer
    )


def _recompute_s(way: Way, forward: dict[LayerProbe, float], backward: dict[LayerProbe, float]) -> float:
    """What both passes of a recomputed layer take more than a forward, a forward and a backward."""
    pairs = [
        (probe, replace(probe, way=_plain(probe.way)))
        for probe in forward
        if probe.way.recompute and probe.way.layer == way.layer
    ]
    return _typical(forward[re] + backward[re] - 2 * forward[plain] - backward[plain] for re, plain in pairs)


def _typical(differences: Iterable[float]) -> float:
    known = list(differences)
    return _rounded(max(statistics.median(known), 0.0)) if known else 0.0


def _memory(way: Way, weighed: Sequence[LayerBytes]) -> LayerMemory:
    few, many = weighed
    more = many.samples - few.samples
    return LayerMemory(
        layer=way.layer,
        activation_bytes=max(many.saved - few.saved, 0) // more,
        transient_bytes=max(many.transient - few.transient, 0) // more,
        tp=way.tp,
        sequence_parallel=way.sequence_parallel,
    )


def _rounded(value: float) -> float:
    """To four digits: what was measured is no better, and people read it."""
    return float(f"{value:.4g}")
