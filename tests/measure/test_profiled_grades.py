"""What the profiler makes of layers that are recomputed in part: their share of forward, and what they keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.files.profiles import dump_profile, load_profile
from galvatron.core.spec import Training
from galvatron.families import load_cluster, load_model
from galvatron.measure.figures import Block
from galvatron.measure.layer_jobs.probes import LayerBytes, LayerFindings, LayerProbe, Variant, probes_of, variants_of
from galvatron.measure.layers import profile_of

_MODEL = load_model("gpt2-tiny", Training(sequence_length=64))


def _seconds(probe: LayerProbe) -> tuple[float, float]:
    """Forward and backward: 2 ms and 5 ms a sample beside 1 ms; recomputing takes 0.6 ms a sample and 0.1 ms more."""
    again = {"": (0.0, 0.0), "rs": (0.6e-3, 0.1e-3), "ra": (1.5e-3, 0.3e-3)}[probe.variant.grade]
    return 2e-3 * probe.samples + 1e-3, (5e-3 + again[0]) * probe.samples + 1e-3 + again[1]


def _findings() -> LayerFindings:
    probes = probes_of(_MODEL, load_cluster("cpu-4"), variants_of(_MODEL, [1], 1))
    kept = {"": 1000, "rs": 600, "ra": 200}
    return LayerFindings(
        device="toy",
        blocks={probe: [Block(_seconds(probe))] * 3 for probe in probes},
        memory={
            variant: [
                LayerBytes(samples=count, saved=count * kept[variant.grade] + 77, transient=0) for count in (1, 3)
            ]
            for variant in dict.fromkeys(probe.variant for probe in probes)
            if variant.plain
        },
    )


def test_shares_and_bytes() -> None:
    profile = profile_of(_MODEL, _findings())
    found = {one.grade: one for one in profile.grades}
    assert {one.layer for one in profile.grades} == {"decoder"}
    assert found["rs"].share == pytest.approx(0.3, rel=1e-3)
    assert found["rs"].fixed_s == pytest.approx(0.1e-3, rel=1e-2)
    assert found["ra"].share == pytest.approx(0.75, rel=1e-3)
    assert (found["rs"].activation_bytes, found["ra"].activation_bytes) == (600, 200)
    assert {one.layer: one.activation_bytes for one in profile.memory}["decoder"] == 1000
    assert [one.forward_s for one in profile.times if one.layer == "decoder"] == [pytest.approx(2e-3, rel=1e-3)]


def test_files_hold_them(tmp_path: Path) -> None:
    profile = profile_of(_MODEL, _findings())
    (tmp_path / "profile.toml").write_text(dump_profile(profile))
    assert load_profile(tmp_path / "profile.toml") == profile
    twice = dump_profile(profile) + '\n[[grades]]\nlayer = "decoder"\ngrade = "rs"\nshare = 0.1\nactivations = "1B"\n'
    (tmp_path / "profile.toml").write_text(twice)
    with pytest.raises(InvalidInput, match=r"grades\[2\] is 'rs' of 'decoder'; expected rs or ra, each once"):
        load_profile(tmp_path / "profile.toml")


def test_only_layers_with_results_to_keep_are_measured_so() -> None:
    graded = {(one.layer, one.strategy) for one in variants_of(_MODEL, [1, 2], 2) if one.grade}
    assert graded == {("decoder", "single+rs"), ("decoder", "single+ra")}
    assert Variant(layer="decoder", index=1, tp=1, sequence_parallel=False, grade="rs").plain
