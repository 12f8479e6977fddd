"""With how many samples layers are measured: as many as TP leaves work for, within time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from galvatron.core.spec import Cluster, ModelSpec, Precision, Strategy, Training
from galvatron.families import load_cluster, load_model
from galvatron.measure.layer_jobs.probes import LayerProbe, Variant, probes_of, variants_of
from galvatron.measure.layer_jobs.runs import Bench
from galvatron.measure.timing import Probe
from galvatron.planner.space import divisors


def _probes(model: ModelSpec, cluster: Cluster) -> tuple[LayerProbe, ...]:
    return probes_of(model, cluster, variants_of(model, divisors(cluster.devices), cluster.devices))


def _counts(probes: tuple[LayerProbe, ...], layer: str, tp: int) -> list[int]:
    return [
        one.samples
        for one in probes
        if one.variant.layer == layer and one.variant.strategy == (f"tp{tp}" if tp > 1 else "single")
    ]


def test_a_split_layer_has_as_much_to_do_as_a_whole_one() -> None:
    model = load_model("bert-huge-32", Training(sequence_length=512))
    probes = _probes(model, load_cluster("titan-rtx-8"))
    assert _counts(probes, "encoder", 1) == [1, 2, 4, 8]
    assert _counts(probes, "encoder", 8) == [1, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("name", "cluster"), [("llama2-7b", "h100-64"), ("llama3-70b", "h100-64"), ("llama2-7b", "h100-1024")]
)
def test_what_is_measured_fits(name: str, cluster: str) -> None:
    """Of the largest degrees few layers are left, and many samples of them: logits of thousands would not fit."""
    model, where = load_model(name, Training()), load_cluster(cluster)
    kinds = {kind.name: kind for kind in model.kinds}
    probes = _probes(model, where)
    for probe in probes:
        kind, parts = kinds[probe.variant.layer], probe.variant.tp
        saved = probe.samples * (kind.split_activation_bytes / parts + kind.replicated_activation_bytes)
        assert probe.samples <= 2 or saved <= where.device.memory_bytes / 4


def test_there_are_two_numbers_of_samples_however_slow_or_small_the_device() -> None:
    cluster = load_cluster("titan-rtx-8")
    weak = replace(cluster, device=replace(cluster.device, fp32_flops_per_s=1e6, memory_bytes=1 << 20))
    probes = _probes(load_model("bert-large", Training()), weak)
    for variant in {probe.variant for probe in probes}:
        assert [probe.samples for probe in probes if probe.variant == variant] == [1, 2]


def test_sharded_and_recomputed_layers_have_the_samples_of_plain_ones() -> None:
    probes = set(_probes(load_model("t5-large", Training()), load_cluster("titan-rtx-8")))
    assert {replace(one, variant=replace(one.variant, sharded=False, recompute=False)) for one in probes} <= probes


def test_a_fast_device_gets_enough_to_do() -> None:
    """Eight samples of 512 tokens keep an H200 busy for half a millisecond: starting kernels takes as long."""
    training = Training(sequence_length=512, precision=Precision.BF16)
    probes = _probes(load_model("bert-huge-32", training), load_cluster("h200-8"))
    assert _counts(probes, "encoder", 1) == [1, 4, 8, 16, 32]
    tiny = load_model("bert-tiny", Training(sequence_length=32))
    assert _counts(_probes(tiny, load_cluster("cpu-4")), "encoder", 1) == [1, 2, 4, 8]
    long = replace(training, sequence_length=4096)
    assert max(_counts(_probes(load_model("llama3-8b", long), load_cluster("h200-8")), "decoder", 1)) == 8


@pytest.mark.parametrize(("tokens", "divided"), [(8192, set()), (65536, {"decoder", "head"})])
def test_long_samples_that_do_not_fit_are_measured_divided(tokens: int, divided: set[str]) -> None:
    """Of 65,536 tokens the logits alone take 34 GB. What is measured whole takes a quarter of a device at most, and two
    samples half of one where they are divided."""
    model = load_model("llama3-8b", Training(sequence_length=tokens, precision=Precision.BF16))
    cluster = load_cluster("h100-8")
    probes = _probes(model, cluster)
    assert {probe.variant.layer for probe in probes} == {"embedding", "decoder", "head"}
    assert {probe.variant.layer for probe in probes if probe.variant.ulysses > 1} == divided
    kinds = {kind.name: kind for kind in model.kinds}
    for probe in probes:
        kind, variant = kinds[probe.variant.layer], probe.variant
        if variant.ulysses > 1:
            assert kind.context is not None
            assert kind.context.problem(Strategy.parse(variant.strategy)) is None
            assert probe.size == probe.samples / variant.ulysses
            assert probe.samples <= 2
        if not variant.fused_loss:
            saved = kind.split_activation_bytes / variant.tp + kind.replicated_activation_bytes
            assert probe.size * saved <= cluster.device.memory_bytes / (4 if variant.ulysses == 1 else 2)


def test_a_slow_device_has_a_smaller_part() -> None:
    """Two samples take half a second at the device's rate, unless heads do not divide so far; then there is one."""
    model = load_model("llama3-8b", Training(sequence_length=1 << 16, precision=Precision.BF16))
    cluster = load_cluster("h100-8")
    block = next(kind for kind in model.kinds if kind.name == "decoder")
    for rate, expected in (
        (1e18, {(2, 1), (2, 2)}),
        (6 * block.forward_flops / 0.5 / 3.9, {(4, 1), (4, 2)}),
        (1e12, {(8, 1)}),
    ):
        slow = replace(cluster, device=replace(cluster.device, bf16_flops_per_s=rate, bf16_peak_flops_per_s=None))
        found = {
            (one.variant.ulysses, one.samples)
            for one in _probes(model, slow)
            if one.variant.layer == "decoder" and one.variant.tp == 1 and one.variant.ep == 1
        }
        assert found == expected


def test_layers_that_cannot_be_divided_are_counted_where_two_samples_do_not_fit() -> None:
    model = load_model("llama3-8b", Training(sequence_length=1 << 20, precision=Precision.BF16))
    whole = replace(model, layers=tuple(replace(layer, context=None) for layer in model.layers))
    assert {probe.variant.layer for probe in _probes(whole, load_cluster("h100-8"))} == {"embedding"}


@pytest.mark.parametrize(("world", "compiles"), [(1, True), (3, False), (3, True)])
def test_ranks_compile_different_layers(world: int, compiles: bool) -> None:
    """Each variant is run ahead by one rank, most samples first, and an out-of-memory ends nothing."""
    probes = _probes(load_model("bert-huge-32", Training(sequence_length=512)), load_cluster("titan-rtx-8"))
    ran: list[LayerProbe] = []

    def probe(asked: LayerProbe) -> Probe:
        ran.append(asked)
        if len(ran) == 2:
            raise torch.OutOfMemoryError
        return Probe(lambda calls: (0.0,))

    for rank in range(world):
        bench = object.__new__(Bench)
        bench._settings = SimpleNamespace(compile=compiles)  # type: ignore[assignment]
        silent: Any = SimpleNamespace(rank=rank, local_world=world, report=lambda *_: None, meet=lambda: None)
        bench._peers, bench._assemblies, bench._pools, bench._kept = silent, {}, {}, {}
        bench._limit_s = None
        bench.probe = probe  # type: ignore[method-assign]
        bench.compile_ahead(probes)
    if world == 1 or not compiles:
        assert not ran
        return
    assert sorted(ran, key=repr) == sorted(probes, key=repr)
    for variant in {own.variant for own in probes}:
        counts = [own.samples for own in ran if own.variant == variant]
        assert counts == sorted(counts, reverse=True)


def _bench(lacks: Callable[[LayerProbe, int], bool], limit_s: float | None = None) -> Bench:
    """One whose device has too little memory for some probes, beside so many layers."""
    bench = object.__new__(Bench)
    bench._peers = SimpleNamespace(gather=lambda own: [own], rank=1, device=torch.device("cpu"))  # type: ignore[assignment]
    bench._assemblies, bench._pools, bench._kept = {}, {}, {}
    bench._limit_s, bench._begun, bench.left_out = limit_s, 0.0, []

    def probe(asked: LayerProbe) -> Probe:
        bench._assemblies[asked.variant] = SimpleNamespace()  # type: ignore[assignment]

        def run(calls: int) -> tuple[float, ...]:
            if lacks(asked, len(bench._assemblies)):
                raise torch.OutOfMemoryError
            return (0.0,)

        return Probe(run)

    bench.probe = probe  # type: ignore[method-assign]
    return bench


_VARIANTS = [Variant(layer=name, index=number, tp=1, sequence_parallel=False) for number, name in enumerate("ab")]


def test_what_fits_alone_must_fit_beside_the_others() -> None:
    """Eight samples of one layer find room only while no other layer has its weights there."""
    probes = [LayerProbe(variant=own, samples=count) for count in (8, 2, 1) for own in _VARIANTS]
    bench = _bench(lambda asked, layers: asked == probes[0] and layers > 1)
    assert set(bench.fitting(probes)) == set(probes[1:])


def test_after_the_time_limit_whole_layers_alone_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come first; each layer that is built takes a second here, and two seconds are given."""
    split = [replace(own, tp=2) for own in _VARIANTS]
    probes = [LayerProbe(variant=own, samples=count) for count in (8, 2, 1) for own in (*split, *_VARIANTS)]
    for limit_s, expected in ((0.5, _VARIANTS), (2.5, [*_VARIANTS, split[0]]), (9.0, [*_VARIANTS, *split])):
        bench = _bench(lambda asked, layers: False, limit_s)
        monkeypatch.setattr("time.monotonic", lambda bench=bench: float(len(bench._assemblies)))
        found = {probe.variant for probe in bench.fitting(probes)}
        assert found == set(expected)
        assert set(bench.left_out) == {*_VARIANTS, *split} - found


def test_little_is_compiled_ahead_where_there_is_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench(lambda asked, layers: False, 10.0)
    ran: list[LayerProbe] = []
    silent: Any = SimpleNamespace(rank=0, local_world=2, report=lambda *_: None, meet=lambda: None)
    bench._peers, bench._settings = silent, SimpleNamespace(compile=True)  # type: ignore[assignment]

    def probe(asked: LayerProbe) -> Probe:
        ran.append(asked)
        return Probe(lambda calls: (0.0,))

    bench.probe = probe  # type: ignore[method-assign]
    monkeypatch.setattr("time.monotonic", lambda: 2.5 * len(ran))
    bench.compile_ahead([LayerProbe(variant=replace(_VARIANTS[0], tp=1 << n), samples=1) for n in range(12)])
    assert len(ran) == 3
