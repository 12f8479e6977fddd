"""From timings to a profile: known constants come back, and they reach the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.files.profiles import dump_profile
from galvatron.core.spec import Cluster, LayerTime, ModelProfile, ModelSpec, Training
from galvatron.families import load_cluster, load_model, load_profile
from galvatron.measure import layers
from galvatron.measure.figures import Block
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
from galvatron.measure.layers import Effort, profile_model, profile_of
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request

FORWARD = {"embedding": (1e-4, 2e-3), "encoder": (8e-3, 1e-3), "head": (5e-3, 3e-3)}
"""Seconds of one sample, and whatever the number."""
SHARDING_S, RECOMPUTE_S = 7e-4, 4e-4


def model_of(name: str = "bert-tiny") -> ModelSpec:
    return load_model(name, Training(sequence_length=32))


def cluster_of(devices: int = 4) -> Cluster:
    base = load_cluster("cpu-4")
    return replace(base, levels=(replace(base.levels[0], units=devices),))


def findings(job: LayerJob) -> LayerFindings:
    """Timings that follow from the constants: TP divides a sample's part, backward takes three times as long."""

    def block(probe: LayerProbe) -> Block:
        slope, fixed = FORWARD[probe.variant.layer]
        forward = probe.samples * slope / probe.variant.tp + fixed + SHARDING_S * probe.variant.sharded
        again = forward + RECOMPUTE_S if probe.variant.recompute else 0
        return Block((forward, 3 * forward + again))

    memory = {
        variant: [LayerBytes(samples=n, saved=500 + 1000 * n // variant.tp, transient=77 + 64 * n) for n in (1, 8)]
        for variant in job.variants
        if variant.plain
    }
    return LayerFindings(device="toy", blocks={probe: [block(probe)] * 2 for probe in job.probes}, memory=memory)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LayerJob]:
    """Measures without processes; the jobs it was given."""
    jobs: list[LayerJob] = []

    def measured(job: LayerJob, progress: object) -> LayerFindings:
        jobs.append(job)
        return findings(job)

    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    monkeypatch.setattr(layers, "measured", measured)
    return jobs


def test_constants_are_recovered(stand_in: list[LayerJob]) -> None:
    profile = profile_model(model_of(), cluster_of())
    for layer, (slope, fixed) in FORWARD.items():
        for tp in (1, 2):
            time = profile.time_of(layer, tp)
            assert time is not None
            assert time.tp == tp
            assert time.forward_s == pytest.approx(slope / tp, rel=1e-3)
            assert time.forward_fixed_s == pytest.approx(fixed, rel=1e-3)
            assert time.backward_ratio == pytest.approx(3, rel=1e-3)
            assert time.backward_fixed_s == pytest.approx(3 * fixed, rel=1e-3)
            assert time.forward_sharded_s == pytest.approx(SHARDING_S, rel=1e-3)
            assert time.recompute_s == pytest.approx(RECOMPUTE_S, rel=1e-3)
            memory = profile.memory_of(layer, tp, sequence_parallel=False)
            assert memory is not None
            assert memory.activation_bytes == pytest.approx(1000 / tp, abs=1)
            assert memory.transient_bytes == 64


def test_starting_kernels_is_no_part_of_a_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU a split layer takes no less time with one sample than with two: both wait for their kernels to start."""
    starting_s = 1.5e-2

    def measured(job: LayerJob, progress: object) -> LayerFindings:
        known = findings(job)
        slow = {
            probe: [Block(tuple(max(seconds, starting_s) for seconds in block.seconds)) for block in blocks]
            for probe, blocks in known.blocks.items()
        }
        return replace(known, blocks=slow)

    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    monkeypatch.setattr(layers, "measured", measured)
    profile = profile_model(load_model("bert-large", Training(sequence_length=32)), load_cluster("titan-rtx-8"))
    slope, fixed = FORWARD["encoder"]
    time = profile.time_of("encoder", 8)
    assert time is not None
    assert (time.forward_least_s, time.backward_least_s) == (starting_s, starting_s)
    line = [time.forward_s * samples + (time.forward_fixed_s or 0) for samples in (16, 64, 256)]
    assert line == pytest.approx([slope / 8 * samples + fixed for samples in (16, 64, 256)], rel=0.05)


def test_a_layer_that_bends_a_little_has_no_least_time() -> None:
    """One sample takes a tenth less than the line through more of them says: kernels of few samples are no worse."""
    variant = Variant(layer="encoder", index=0, tp=1, sequence_parallel=False)
    seconds = {1: 0.9e-2, 2: 2e-2, 4: 4e-2, 8: 8e-2}
    blocks = {LayerProbe(variant=variant, samples=count): [Block((one, 2 * one))] * 2 for count, one in seconds.items()}
    weighed = {variant: [LayerBytes(samples=n, saved=n, transient=n) for n in (1, 8)]}
    (time,) = profile_of(model_of(), LayerFindings(device="toy", blocks=blocks, memory=weighed)).times
    assert (time.forward_least_s, time.backward_least_s) == (0, 0)
    assert time.forward_s + (time.forward_fixed_s or 0) == pytest.approx(0.95e-2, rel=0.06)


@pytest.mark.parametrize("counts", [(1, 2), (1,)])
def test_a_whole_sample_follows_from_a_devices_part_of_it(counts: tuple[int, ...]) -> None:
    """A layer that takes a second for its eighth of two samples takes four for one that is not divided. What it keeps
    because of that is not part of it: the result of attention once more and, where the rest is recomputed, what was
    exchanged. From a single sample nothing that is fixed can be told."""
    fixed_s, fixed_bytes = (0.01, 500) if len(counts) > 1 else (0.0, 0)
    model = load_model("llama3-8b", Training(sequence_length=1 << 17))
    variant = Variant(layer="decoder", index=0, tp=1, sequence_parallel=False, ulysses=8)
    graded = replace(variant, grade="rs")
    seconds = {variant: (fixed_s, 0.495), graded: (fixed_s, 0.545)}
    context = next(kind.context for kind in model.kinds if kind.name == "decoder")
    assert context is not None
    one, exchanged = context.query_bytes // 8, (2 * context.query_bytes + context.key_value_bytes) // 8
    divided = {variant: one, graded: exchanged}
    found = LayerFindings(
        device="toy",
        blocks={
            LayerProbe(variant=own, samples=count): [Block((fixed + each * count, 2 * (fixed + 0.495 * count)))] * 2
            for own, (fixed, each) in seconds.items()
            for count in counts
        },
        memory={
            own: [
                LayerBytes(samples=n / 8, saved=fixed_bytes + (each + 100) * n, transient=8 * n)
                for n in (counts if len(counts) > 1 else (0, 1))
            ]
            for own, each in divided.items()
        },
    )
    profile = profile_of(model, found)
    decoder, grade = profile.time_of("decoder"), profile.grade_of("decoder", "rs")
    memory = profile.memory_of("decoder", 1, sequence_parallel=False)
    assert decoder is not None
    assert grade is not None
    assert memory is not None
    assert (decoder.forward_s, decoder.forward_fixed_s) == pytest.approx((8 * 0.495, fixed_s), rel=1e-3)
    assert decoder.backward_ratio == pytest.approx(2, rel=1e-3)
    assert (memory.activation_bytes, grade.activation_bytes, memory.transient_bytes) == (800, 800, 64)
    assert grade.share == pytest.approx(0.05 / 0.495, rel=1e-2)


def test_only_what_can_be_split_is_measured_split(stand_in: list[LayerJob]) -> None:
    """bert-tiny has two heads, and embeddings no sequence to divide."""
    profile_model(model_of(), cluster_of(4))
    variants = {(variant.layer, variant.strategy) for variant in stand_in[0].variants}
    assert {text for layer, text in variants if layer == "encoder"} == {
        "single", "tp2", "tp2+sp", "sdp2", "single+rc", "single+rs", "single+ra",
    }  # fmt: skip
    assert {text for layer, text in variants if layer == "embedding"} == {"single", "tp2", "tp4", "sdp2", "single+rc"}


def test_layers_that_do_not_fit_together_are_measured_one_after_the_other() -> None:
    """A device of 16 GB holds no eight variants of a vocabulary of 128,000 at once."""
    model = load_model("llama3-8b", Training(sequence_length=1024, compile=True))
    cluster = load_cluster("h100-8")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=16 * 10**9))
    probes = probes_of(model, small, variants_of(model, (1, 2, 4, 8), 8))
    groups = groups_of(probes, model, small)
    assert sorted(map(str, probes)) == sorted(str(probe) for group in groups for probe in group)
    assert len(groups) > 1
    assert all(len({probe.variant for probe in group}) == 1 for group in groups if group[0].variant.layer == "head"
               and group[0].variant.tp == 1)  # fmt: skip
    logits = model.layers[-1]
    for probe in probes:
        if probe.variant.layer == "head":
            held = probe.samples * (logits.split_activation_bytes + logits.transient_bytes) / probe.variant.tp
            assert held <= 0.25 * 16e9 or probe.samples <= 2
    assert len(groups_of(probes, model, replace(cluster, device=replace(cluster.device, memory_bytes=8 * 10**12)))) == 1


def test_processes_that_share_cores_measure_at_once(stand_in: list[LayerJob]) -> None:
    profile_model(model_of(), replace(cluster_of(4), compute_contention=2.0))
    profile_model(model_of(), cluster_of(4))
    assert [job.devices for job in stand_in] == [4, 1]


def test_what_was_measured_before_is_not_measured_again(stand_in: list[LayerJob]) -> None:
    first = profile_model(model_of(), cluster_of())
    assert profile_model(model_of(), cluster_of()) == first
    assert len(stand_in) == 1
    profile_model(load_model("bert-tiny", Training(sequence_length=64)), cluster_of())
    profile_model(model_of(), cluster_of(), tp_degrees=[2])
    profile_model(model_of(), cluster_of(), fresh=True)
    assert len(stand_in) == 4


def test_the_file_reads_back_equal_and_says_where_it_is_from(stand_in: list[LayerJob], tmp_path: Path) -> None:
    profile = profile_model(model_of(), cluster_of())
    path = tmp_path / "profile.toml"
    path.write_text(dump_profile(profile), encoding="utf-8")
    assert load_profile(path) == profile
    for word in ("measured", "toy", "torch", "rounds"):
        assert word in profile.source


def compute_s(plan: Plan) -> float:
    return plan.stages[0].time.compute_s


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "dp2+rc", "sdp2"])
def test_the_figures_reach_the_plan(strategy: str) -> None:
    """The compute time of a plan is what its layers' constants add up to, and its memory what they save."""
    model, cluster = model_of(), cluster_of(2)
    variants = tuple(
        Variant(layer=layer, index=0, tp=tp, sequence_parallel=False, sharded=sharded, recompute=recompute)
        for layer in FORWARD
        for tp, sharded, recompute in ((1, False, False), (2, False, False), (1, True, False), (1, False, True))
    )
    probes = tuple(LayerProbe(variant=variant, samples=samples) for variant in variants for samples in (1, 2, 4, 8))
    profile = profile_of(model, findings(LayerJob(model=model, groups=(probes,), devices=1, rounds=2)))
    request = Request(model=model, cluster=cluster, batch=8, profile=profile)
    plan = priced(request, [[strategy] * len(model.layers)])
    tp, samples = (2, 8) if strategy == "tp2" else (1, 4)
    expected = 0.0
    for layer in model.layers:
        slope, fixed = FORWARD[layer.name]
        forward = samples * slope / tp + fixed + (SHARDING_S if strategy == "sdp2" else 0)
        expected += 4 * forward + (forward + RECOMPUTE_S if strategy.endswith("+rc") else 0)
    assert compute_s(plan) == pytest.approx(expected, rel=2e-3)
    if strategy in ("dp2", "tp2"):
        assert plan.stages[0].memory.activations == pytest.approx(samples * 1000 / tp * len(model.layers), abs=100)
    assert plan.profile == profile


def test_a_degree_that_was_not_measured_is_taken_from_the_nearest_below() -> None:
    def time(tp: int, forward_s: float) -> LayerTime:
        return LayerTime(layer="encoder", forward_s=forward_s, tp=tp, forward_fixed_s=0.0, backward_fixed_s=0.0)

    model = model_of("bert-large")
    request = Request(model=model, cluster=cluster_of(8), batch=8, profile=None)

    def encoders_s(*times: LayerTime) -> float:
        profile = ModelProfile(name="p", times=times)
        tp = ["tp8"] * len(model.layers)
        full = priced(replace(request, profile=profile), [tp])
        none = priced(replace(request, profile=ModelProfile(name="p", times=(time(1, 1e-9),))), [tp])
        return (compute_s(full) - compute_s(none)) / 24

    assert encoders_s(time(1, 0.8)) == pytest.approx(8 * 3 * 0.1, rel=1e-3)
    assert encoders_s(time(1, 0.8), time(2, 0.6)) == pytest.approx(8 * 3 * 0.6 * 2 / 8, rel=1e-3)


def test_what_time_was_too_short_for_is_named_and_measured_with_more(
    stand_in: list[LayerJob], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a limit cut short is found again under that limit, and is no answer to who gives more time."""

    def cut_short(job: LayerJob, progress: object) -> LayerFindings:
        known, split = findings(job), tuple(variant for variant in job.variants if variant.tp > 1)
        if job.limit_s != 60:
            stand_in.append(job)
            return known
        blocks = {probe: blocks for probe, blocks in known.blocks.items() if probe.variant.tp == 1}
        return replace(known, blocks=blocks, left_out=split)

    monkeypatch.setattr(layers, "measured", cut_short)
    short = profile_model(model_of(), cluster_of(), effort=Effort(limit_s=60))
    assert "the time limit of 60.0 s was over" in caplog.text
    assert "encoder tp2" in caplog.text
    assert {time.tp for time in short.times} == {1}
    assert profile_model(model_of(), cluster_of(), effort=Effort(limit_s=60)) == short
    assert not stand_in
    whole = profile_model(model_of(), cluster_of())
    assert max(time.tp for time in whole.times) > 1
    assert profile_model(model_of(), cluster_of(), effort=Effort(limit_s=60)) == whole, "all was measured since"
    assert len(stand_in) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"tp_degrees": [3]}, "tp-degrees: 3 given; expected divisors of the 4")],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        profile_model(model_of(), cluster_of(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "expected"), [({"rounds": 1}, "rounds: 1"), ({"limit_s": 0.0}, "time-limit: 0 s")])
def test_no_effort_is_refused(fields: dict[str, float], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        Effort(**fields)  # type: ignore[arg-type]


def test_a_model_of_figures_alone_is_refused() -> None:
    with pytest.raises(InvalidInput, match="described by figures alone"):
        profile_model(replace(model_of(), config=None), cluster_of())
