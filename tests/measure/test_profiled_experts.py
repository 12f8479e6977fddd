"""Layers with experts, measured as they run: whole, and with their experts divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore
from transformers import MixtralConfig, MixtralForCausalLM

import galvatron
from galvatron.core.files.clusters import load_cluster
from galvatron.core.files.profiles import dump_profile, load_profile
from galvatron.core.spec import Experts, LayerSpec, LayerTime, ModelProfile, ModelSpec, Strategy, Training
from galvatron.measure.clusters import profile_cluster
from galvatron.measure.layer_jobs.probes import Variant, variants_of
from galvatron.measure.layer_jobs.runs import Bench
from galvatron.measure.layers import Effort, profile_model
from galvatron.measure.rehearsal.alone import alone_as
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.processes.peers import Peers

_CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
}
_LAYER = LayerSpec(
    name="block",
    parameters=1000,
    forward_flops=10**9,
    split_activation_bytes=1000,
    boundary_bytes=0,
    experts=Experts(count=4, parameters=800, forward_flops=10**9 // 2, activation_bytes=500, dispatch_bytes=0),
)


def _model(layer: LayerSpec = _LAYER) -> ModelSpec:
    return ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training())


def _described() -> ModelSpec:
    model: Any = MixtralForCausalLM(MixtralConfig(**_CONFIG))
    batch = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    return galvatron.describe(model, batch, Training(sequence_length=16, dropout=False))


def _alone() -> Peers:
    return Peers(rank=0, world=1, local_world=1, device=torch.device("cpu"), store=HashStore(), report=lambda *_: None)


def _profile() -> ModelProfile:
    """Whole 10 ms a sample and 20 in backward; at EP 2 as long, at EP 4 a millisecond more, and in backward 3."""
    times = [LayerTime(layer="block", forward_s=0.010, forward_fixed_s=0.001, backward_fixed_s=0.002)]
    for ep, forward_s, backward_s in ((2, 0.010, 0.020), (4, 0.011, 0.023)):
        times.append(
            LayerTime(
                layer="block",
                forward_s=forward_s,
                backward_ratio=backward_s / forward_s,
                forward_fixed_s=0.0015,
                backward_fixed_s=0.002,
                ep=ep,
            )
        )
    return ModelProfile(name="toy", times=tuple(times))


def _ns(strategy: str, samples: int, profile: ModelProfile | None) -> int:
    cluster = replace(load_cluster("a100-8").shrunk(4), overlap_slowdown=1.0)
    levels = tuple(replace(level, bytes_per_s=1e15, latency_s=0.0) for level in cluster.levels)
    cost = CostModel(model=_model(), cluster=replace(cluster, levels=levels), conventions=GALVATRON, profile=profile)
    stage = cost.stage([Strategy.parse(strategy)], 1)
    return int(stage.tables(np.array(samples), np.array(1000)).time_ns[0, 0])


def test_layers_with_experts_are_measured_at_each_degree() -> None:
    degrees = {variant.ep: variant for variant in variants_of(_model(), [1], 8)}
    assert set(degrees) == {1, 2, 4}, "8 do not divide 4 experts"
    assert degrees[4].strategy == "dp4/ep4"
    assert degrees[4].ranks == 4
    dense = replace(_LAYER, experts=None)
    assert {variant.ep for variant in variants_of(_model(dense), [1], 8)} == {1}


def test_what_dividing_experts_takes_is_added_once() -> None:
    """Links are free here: what is left is what was measured."""
    profile = _profile()
    milliseconds = {text: _ns(text, 8, profile) / 1e6 for text in ("dp4", "dp4/dp2-ep2", "dp4/ep4", "dp4/ep4+rc")}
    assert milliseconds["dp4"] == pytest.approx(2 * 30 + 3, rel=1e-3)
    assert milliseconds["dp4/dp2-ep2"] == pytest.approx(2 * 30 + 3 + 0.5, rel=1e-3)
    assert milliseconds["dp4/ep4"] == pytest.approx(2 * 34 + 3 + 0.5, rel=1e-3)
    assert milliseconds["dp4/ep4+rc"] == pytest.approx(2 * (34 + 11) + 4 + 1.0, rel=1e-3)


def test_the_file_reads_back_equal_and_old_digests_stay(tmp_path: Path) -> None:
    profile = _profile()
    (tmp_path / "profile.toml").write_text(dump_profile(profile))
    assert load_profile(tmp_path / "profile.toml") == profile
    alone = replace(profile, times=profile.times[:1])
    assert "ep" not in alone.to_dict()["times"][0]
    assert alone.time_of("block") == profile.time_of("block")


def test_variants_of_an_unknown_family_have_layers_of_their_own() -> None:
    """Its embedding is split where it is: a variant would run the parameters of the last one that was made."""
    bench = Bench(_described(), _alone())
    with alone_as(0, 2):
        variants = [Variant(layer="embedding", index=0, tp=tp, sequence_parallel=False) for tp in (1, 2)]
        stages = [bench.assembly(variant).stage for variant in variants]
        shapes = [[tuple(own.shape) for own in stage.parameters()] for stage in stages]
        divided = Variant(layer="block", index=1, tp=1, sequence_parallel=False, ep=2)
        experts = {tuple(own.shape) for own in bench.assembly(divided).stage.parameters()}
    assert shapes == [[(67, 32)], [(34, 32)]]
    assert (2, 32, 48) in experts, "two of four experts"


@pytest.mark.slow
def test_a_profiled_mixture_of_experts_is_planned(tmp_path: Path) -> None:
    """Real processes measure links and layers of a tiny Mixtral; the plan is priced by what they found."""
    spec = _described()
    cluster = profile_cluster(2, fresh=True, rounds=2)
    assert cluster.groups[0].all_to_all_bytes_per_s
    profile = profile_model(spec, cluster, fresh=True, effort=Effort(rounds=2))
    assert {time.ep for time in profile.times if time.layer == "block"} == {1, 2}
    (tmp_path / "profile.toml").write_text(dump_profile(profile))
    plan = galvatron.plan(spec, cluster, batch=8, profile=tmp_path / "profile.toml")
    assert plan.certificate is not None
    assert plan.certificate.gap == 0
