"""Really measured, in processes of their own: the structure is right, whatever the times are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rank_jobs import FrozenObjects, LateReader

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import Cluster, Collective, ModelSpec, Strategy, Training
from galvatron.core.spec.strategy import Kind
from galvatron.families import load_cluster, load_model, load_profile
from galvatron.measure.clusters import profile_cluster
from galvatron.measure.layer_jobs import probes
from galvatron.measure.layers import Effort, profile_model
from galvatron.measure.models import load_any_model
from galvatron.processes.helper import measured


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "galvatron", *arguments], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
def test_a_cluster_and_a_model_from_the_command_line(cache: Path) -> None:
    """Two processes are measured, then a tiny model for them, then a plan is made from both files."""
    cluster_file, profile_file = cache / "cluster.toml", cache / "profile.toml"
    done = run("profile", "cluster", "--devices", "2", "--rounds", "2", "-o", str(cluster_file))
    assert done.returncode == 0, done.stderr
    assert "measuring cluster" in done.stderr
    cluster = load_cluster(cluster_file)
    assert cluster.devices == 2
    assert [group.ranks for group in cluster.groups] == [(0, 1)]
    assert cluster.device.memory_bytes > cluster.reserved_bytes > 1 << 20
    assert 1e7 < cluster.device.fp32_flops_per_s < 1e15
    pair = Strategy.parse("dp2").factors(Kind.DP)
    for collective in Collective:
        assert 1e6 <= cluster.link(pair, collective).bytes_per_s < 1e12
        assert 0 <= cluster.link(pair, collective).latency_s < 1
    done = run(
        *("profile", "model", "bert-tiny", "--cluster", str(cluster_file), "--sequence-length", "16"),
        *("--no-dropout", "--rounds", "2", "-o", str(profile_file)),
    )
    assert done.returncode == 0, done.stderr
    model = load_model("bert-tiny", Training(sequence_length=16, dropout=False))
    profile = load_profile(profile_file)
    assert {time.layer for time in profile.times} == {kind.name for kind in model.kinds}
    assert {(time.tp, time.sequence_parallel) for time in profile.times if time.layer == "encoder"} == {
        (1, False), (2, False), (2, True),
    }  # fmt: skip
    for kind in model.kinds:
        whole, split = (profile.memory_of(kind.name, tp, sequence_parallel=False) for tp in (1, 2))
        assert whole is not None
        assert split is not None
        if kind.name == "encoder":  # counted op by op for this family, and checked against the stock model elsewhere
            assert whole.activation_bytes == pytest.approx(kind.activation_bytes, rel=0.1)
            halved = kind.split_activation_bytes / 2 + kind.replicated_activation_bytes
            assert split.activation_bytes == pytest.approx(halved, rel=0.1)
    done = run(
        *("plan", "bert-tiny", "--cluster", str(cluster_file), "--profile", str(profile_file), "--batch", "8"),
        *("--sequence-length", "16", "--no-dropout", "--json"),
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["profile"]["name"] == profile.name
    assert plan["cluster"]["facts"]["groups"][0]["ranks"] == [0, 1]


@pytest.fixture
def jobs_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("jobs_importable")
def test_rank_0_stays_until_all_are_done() -> None:
    measured(LateReader(), None)


@pytest.mark.usefixtures("jobs_importable")
def test_no_rank_waits_for_the_garbage_collector_of_another() -> None:
    assert all(count > 10_000 for count in measured(FrozenObjects(), None))


@pytest.mark.slow
def test_what_fails_in_a_rank_is_said_without_a_traceback(cache: Path) -> None:
    cluster = load_cluster("cpu-4")
    broken = load_model("bert-tiny", Training(sequence_length=16))
    assert broken.config is not None
    broken.config["model_type"] = "no-such-thing"  # type: ignore[index]
    with pytest.raises(GalvatronError, match="no-such-thing"):
        profile_model(broken, cluster, effort=Effort(rounds=2))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("profile", "cluster", "--devices", "0"), "devices: 0 given; expected at least 1"),
        (("profile", "cluster", "--rounds", "1"), "rounds: 1 given"),
        (
            ("profile", "cluster", "-o", "cluster.json"),
            "output: 'cluster.json' given; expected a name that ends in .toml",
        ),
        (("profile", "model", "bert-tiny", "-c", "cpu-4", "--tp-degrees", "two"), "tp-degrees: 'two' given"),
        (("profile", "model", "bert-tiny", "-c", "cpu-4", "--tp-degrees", "3"), "tp-degrees: 3 given"),
        (("profile", "model", "no-such-model", "-c", "cpu-4"), "unknown model 'no-such-model'"),
    ],
)
def test_mistakes_are_named_without_a_traceback(arguments: tuple[str, ...], expected: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_under_torchrun_its_processes_measure(cache: Path) -> None:
    """Started by torchrun, the same command measures with those processes, and one of them speaks."""
    file = cache / "cluster.toml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "galvatron", "profile", "cluster", "--rounds", "2", "-o", str(file)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert load_cluster(file).devices == 2
    assert done.stdout.count("2-processes: ") == 1


def test_under_torchrun_the_number_of_processes_is_torchruns(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="torchrun started 1 processes"):
        profile_cluster(2)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2])
def test_a_long_sample_is_measured_as_one_of_its_devices_has_it(
    samples: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that cannot hold two samples, and on one that besides would take long for them. A whole one keeps
    what one measured whole does; what is kept only because samples are divided, the planner adds where they are."""
    monkeypatch.setattr(probes, "LONG_SEQUENCE", 512)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128,
    }  # fmt: skip
    model = load_any_model(config, Training(sequence_length=1024, dropout=False))
    (decoder,) = (kind for kind in model.kinds if kind.name == "decoder")
    cluster = load_cluster("cpu-4")
    large, small = (
        replace(cluster, device=replace(cluster.device, memory_bytes=size), levels=())
        for size in (1 << 40, 3 * (decoder.activation_bytes + decoder.transient_bytes))
    )
    if samples == 1:
        small = replace(small, device=replace(small.device, fp32_flops_per_s=1e6))
    assert {own.variant.ulysses for own in _decoders(model, small)} == {2}
    assert max(own.samples for own in _decoders(model, small)) == samples
    whole, divided = (profile_model(model, own, effort=Effort(rounds=2)) for own in (large, small))
    kept, known = (own.memory_of("decoder", 1, sequence_parallel=False) for own in (divided, whole))
    assert kept is not None
    assert known is not None
    assert kept.activation_bytes == pytest.approx(known.activation_bytes, rel=0.02)
    assert divided.time_of("decoder") != whole.time_of("decoder")


def _decoders(model: ModelSpec, cluster: Cluster) -> list[probes.LayerProbe]:
    made = probes.probes_of(model, cluster, probes.variants_of(model, (1,), 1))
    return [probe for probe in made if probe.variant.layer == "decoder"]
