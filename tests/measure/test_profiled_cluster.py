"""From timings to a cluster: known constants come back, islands are found where they are, files read back equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from findings_oracle import SIZES, Truth, findings

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import dump_cluster
from galvatron.core.spec import Collective, Factor, Strategy
from galvatron.core.spec.strategy import Kind
from galvatron.families import load_cluster
from galvatron.measure import clusters
from galvatron.measure.cluster_jobs.findings import ClusterProbe, GroupProbe, TransferProbe
from galvatron.measure.cluster_jobs.shapes import factors_of, groups_of, shapes
from galvatron.measure.clusters import cluster_of, profile_cluster
from galvatron.measure.figures import Block

ROUGHLY = 0.006  # figures are rounded to three factors


def test_constants_are_recovered() -> None:
    truth = Truth(contention=2.0)
    cluster = cluster_of(findings(truth))
    assert cluster.devices == 4
    assert cluster.device.fp32_flops_per_s == pytest.approx(truth.fp32_flops_per_s, rel=ROUGHLY)
    assert cluster.device.memory_bytes_per_s == pytest.approx(5e9, rel=ROUGHLY)
    assert cluster.device.layer_overhead_s == pytest.approx(3e-4, rel=ROUGHLY)
    assert cluster.overlap_slowdown == pytest.approx(1.25, rel=ROUGHLY)
    assert cluster.compute_contention == pytest.approx(2.0, rel=ROUGHLY)
    assert cluster.message_contention == pytest.approx(2.75, rel=ROUGHLY)
    for strategy in ("dp4", "dp2-tp2", "tp2-dp2"):
        factors = Strategy.parse(strategy).factors(Kind.DP)
        for collective in Collective:
            link = cluster.link(factors, collective)
            slow = truth.slower(collective)
            assert link.bytes_per_s == pytest.approx(1e9 / slow, rel=ROUGHLY), (strategy, collective)
            assert link.latency_s == pytest.approx(truth.latency_s * slow, rel=ROUGHLY)


@pytest.mark.parametrize("measured", [0.7, 1.0])
def test_nothing_is_faster_beside_something_else(measured: float) -> None:
    cluster = cluster_of(findings(Truth(overlap_slowdown=measured, message_contention=measured)))
    assert (cluster.overlap_slowdown, cluster.message_contention) == (1.0, 1.0)


@pytest.mark.parametrize(("backend", "fragmentation"), [("nccl", 0.06), ("gloo", 0.0)])
def test_a_gpu_has_an_allocator_that_loses_some(backend: str, fragmentation: float) -> None:
    assert cluster_of(findings(Truth(backend=backend))).fragmentation == fragmentation


def test_no_link_is_free() -> None:
    """Where noise has larger messages take no longer than small ones, their bytes still take time."""
    found = findings(Truth())
    noise: dict[ClusterProbe, list[Block]] = {
        probe: [Block((0.004,))] * 3 for probe in found.blocks if isinstance(probe, GroupProbe | TransferProbe)
    }
    cluster = cluster_of(replace(found, blocks={**found.blocks, **noise}))
    pair = Strategy.parse("dp2-tp2").factors(Kind.DP)
    link = cluster.link(pair, Collective.ALL_GATHER)
    assert link.bytes_per_s == pytest.approx(SIZES[-1] / 2 / 0.004, rel=ROUGHLY)
    assert link.latency_s == pytest.approx(0.004, rel=ROUGHLY)


def test_equal_links_are_one_level() -> None:
    """A fifth more or less is noise."""
    cluster = cluster_of(findings(Truth(devices=8, per_node=8, rings={1: 1.2e9, 2: 1e9, 4: 0.9e9})))
    assert [level.units for level in cluster.levels] == [8]
    assert not cluster.has_uneven_links


def test_islands_inside_a_node_are_found() -> None:
    cluster = cluster_of(findings(Truth(devices=8, per_node=8, rings={1: 9e9, 2: 3e9, 4: 3e9})))
    assert [level.units for level in cluster.levels] == [2, 4]
    assert cluster.levels[0].bytes_per_s == pytest.approx(9e9, rel=ROUGHLY)
    assert cluster.levels[1].bytes_per_s == pytest.approx(3e9, rel=ROUGHLY)
    assert cluster.has_uneven_links


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_are_a_level_and_their_link_is_shared_or_not(shared: bool) -> None:
    """One device alone gets the whole of a shared link, and of lanes just its own."""
    truth = Truth(devices=8, per_node=4, rings={1: 8e9, 2: 8e9, 4: 1e9}, transfers={4: (1e9, 4e9 if shared else 1e9)})
    cluster = cluster_of(findings(truth))
    node, outer = cluster.levels
    assert (node.units, outer.units, outer.name, outer.shared) == (4, 2, "cluster", shared)
    assert outer.bytes_per_s == pytest.approx(4e9 if shared else 1e9, rel=ROUGHLY)
    pair = cluster_of(findings(truth)).stage_link(4)
    assert pair.bytes_per_s == pytest.approx(1e9, rel=ROUGHLY), "each of the four gets a quarter, or its lane"


def test_a_little_contention_is_noise() -> None:
    assert cluster_of(findings(Truth(contention=1.04))).compute_contention == 1.0


@pytest.mark.parametrize("truth", [Truth(), Truth(devices=8, per_node=4, rings={1: 9e9, 2: 9e9, 4: 1e9})])
def test_the_file_reads_back_equal(tmp_path: Path, truth: Truth) -> None:
    cluster = cluster_of(findings(truth))
    path = tmp_path / "cluster.toml"
    path.write_text(dump_cluster(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster
    assert "measured" in cluster.source
    assert "rounds" in cluster.source
    assert "torch" in cluster.source


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("[1, 2]", "a group of device 0"), ("[0, 4]", "among 4 devices"), ("[1, 0]", "in ascending order")],
)
def test_a_group_that_cannot_be_is_refused(tmp_path: Path, ranks: str, expected: str) -> None:
    path = tmp_path / "cluster.toml"
    content = dump_cluster(cluster_of(findings(Truth())))
    assert "ranks = [0, 1]" in content
    path.write_text(content.replace("ranks = [0, 1]", f"ranks = {ranks}", 1), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"groups\[0\].ranks") as caught:
        load_cluster(path)
    assert expected in str(caught.value)


def test_every_axis_of_eight_devices_has_a_measured_group() -> None:
    found = {groups_of(8, factors)[0] for factors in shapes(8)}
    assert found == {(0, 1), (0, 2), (0, 4), (0, 1, 2, 3), (0, 1, 4, 5), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6, 7)}
    assert groups_of(8, (Factor(2, 2),)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [factor.size for factor in factors_of(12)] == [2, 2, 3]


def test_what_was_measured_before_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    runs = []

    def stand_in(job: object, progress: object) -> object:
        runs.append(job)
        return findings(Truth())

    monkeypatch.setattr(clusters, "measured", stand_in)
    first = profile_cluster(4)
    assert profile_cluster(4) == first
    assert len(runs) == 1
    profile_cluster(4, fresh=True)
    assert len(runs) == 2
    profile_cluster(2)
    assert len(runs) == 3, "other devices, other figures"


def test_all_devices_are_not_measured_again_by_their_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """'galvatron plan' asks for all that there are, 'galvatron train' for so many."""
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    found = findings(Truth())
    runs = iter([found])
    monkeypatch.setattr(clusters, "measured", lambda job, progress: next(runs))
    first = profile_cluster()
    assert profile_cluster() == profile_cluster(found.devices) == first


@pytest.mark.parametrize(("options", "expected"), [({"devices": 0}, "devices: 0"), ({"rounds": 1}, "rounds: 1")])
def test_what_cannot_be_measured_is_refused(options: dict[str, int], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        profile_cluster(**options)  # type: ignore[arg-type]
