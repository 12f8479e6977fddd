"""Layers that nobody measured, priced by a roofline: by hand for one layer on a small cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_layer import BLOCK, CLUSTER, MB, H

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import dump_cluster, load_cluster
from galvatron.core.spec import (
    Attention,
    Cluster,
    Experts,
    Kept,
    LayerSpec,
    LayerTime,
    ModelProfile,
    ModelSpec,
    Precision,
    Strategy,
    Training,
)
from galvatron.families import load_model
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.cost.roofline import attention_flops

_TOKENS = 100
_ATTENTION = BLOCK.forward_flops - 2 * _TOKENS * BLOCK.parameters
"""1.8e9 of its 1e10 operations."""
_DEVICE = replace(
    CLUSTER.device,
    bf16_products_flops_per_s=4e12,
    bf16_attention_flops_per_s=2e12,
    traffic=2.8,
    compiled_traffic=0.7,
)
_LINE = replace(CLUSTER, device=_DEVICE)


def _compute_s(
    strategy: str,
    *,
    layer: LayerSpec = BLOCK,
    cluster: Cluster = _LINE,
    samples: int = 4,
    profile: ModelProfile | None = None,
    **training: object,
) -> float:
    """Of one layer, for so many samples on each device."""
    settings: dict[str, object] = {"precision": Precision.BF16, "sequence_length": _TOKENS}
    model = ModelSpec(
        name="toy",
        family="custom",
        layers=(layer,) * 2,
        training=Training(**(settings | training)),  # type: ignore[arg-type]
    )
    cost = CostModel(model=model, cluster=cluster, conventions=GALVATRON, profile=profile)
    parsed = Strategy.parse(strategy)
    costs = cost.stage([parsed], 1).layer_costs(np.array(samples * parsed.data_degree))
    return float(np.broadcast_to(costs.compute_s, (1, 1))[0, 0])


def test_products_attention_and_traffic_are_apart() -> None:
    products = (BLOCK.forward_flops - _ATTENTION) / 4e12
    attention, traffic = _ATTENTION / 2e12, 2.8 * 100 * MB / 28e9
    once = 3 * products + 3.5 * attention + 3 * traffic
    assert _compute_s("dp4") == pytest.approx(4 * once)
    compiled = 3 * products + 3.5 * attention + 3 * traffic / 4
    assert _compute_s("dp4", compile=True) == pytest.approx(4 * compiled)
    assert _compute_s("dp4+rc") == pytest.approx(4 * (once + products + attention + traffic))


def test_tp_divides_what_it_splits_and_sequence_parallelism_the_rest() -> None:
    """Of what the layer saves 20 MB are whole on each rank, and are moved by each."""
    whole = _compute_s("dp4")
    assert BLOCK.tensor_parallel is not None
    layer = replace(BLOCK, tensor_parallel=replace(BLOCK.tensor_parallel, sequence_divides=(8,)))
    rest = 4 * 3 * 2.8 * 20 * MB / 28e9
    assert _compute_s("tp4") == pytest.approx((whole - rest) / 4 + rest)
    assert _compute_s("tp4+sp", layer=layer) == pytest.approx(whole / 4)
    assert _compute_s("tp4", layer=replace(BLOCK, tensor_parallel=None)) == pytest.approx(whole)


def test_launches_run_ahead_of_the_device() -> None:
    """What a layer takes at least, and nothing on top of it."""
    small = replace(BLOCK, forward_flops=2 * _TOKENS * MB, parameters=MB, replicated_parameters=0)
    small = replace(small, split_activation_bytes=MB, replicated_activation_bytes=0)
    assert _compute_s("dp4", layer=small, samples=1) == pytest.approx(3 * H)
    assert _compute_s("dp4", layer=small, samples=100) == pytest.approx(100 * 3 * (2 * _TOKENS * MB / 4e12 + 1e-4))


def test_weights_are_read_once_however_few_the_samples() -> None:
    """82 MB at 28 GB/s take longer than launching, and TP divides all but 2 MB of them."""
    idle = replace(BLOCK, forward_flops=1, split_activation_bytes=0, replicated_activation_bytes=0)
    assert _compute_s("dp4", layer=idle, samples=1) == pytest.approx(3 * 82 * MB / 28e9)
    assert _compute_s("tp2", layer=idle, samples=1) == pytest.approx(3 * 42 * MB / 28e9)
    assert _compute_s("dp4", layer=replace(idle, forward_flops=0), samples=1) == pytest.approx(3 * H)


def test_what_is_measured_counts_instead() -> None:
    profile = ModelProfile(name="p", times=(LayerTime(layer="block", forward_s=0.5, backward_ratio=2.0),))
    assert _compute_s("dp4", profile=profile) == _compute_s("dp4", profile=profile, cluster=CLUSTER)


def test_fp32_and_devices_without_one_have_one_rate() -> None:
    assert _compute_s("dp4", precision=Precision.FP32) == _compute_s("dp4", precision=Precision.FP32, cluster=CLUSTER)
    assert _compute_s("dp4", cluster=CLUSTER) == pytest.approx(4 * 3 * BLOCK.forward_flops / 4e12 + 3 * H)


def test_eager_attention_has_products_like_others() -> None:
    expected = 3 * (BLOCK.forward_flops / 4e12 + 2.8 * 100 * MB / 28e9)
    assert _compute_s("dp4", attention=Attention.EAGER) == pytest.approx(4 * expected)


def test_selective_recompute_moves_what_forward_moves() -> None:
    layer = replace(BLOCK, selective=Kept(split_bytes=40 * MB, flops=0))
    dropped = 100 * MB - 45 * MB  # 5 MB of input are kept too
    again = _compute_s("dp4+rs", layer=layer) - _compute_s("dp4", layer=layer)
    assert again == pytest.approx(4 * 2.8 * dropped / 28e9)


def test_weights_of_experts_meet_the_tokens_that_chose_them() -> None:
    training = Training(sequence_length=_TOKENS)
    experts = Experts(count=4, parameters=40 * MB, forward_flops=10**9, activation_bytes=0, dispatch_bytes=1)
    sparse = replace(BLOCK, experts=experts)
    assert attention_flops(sparse, training) == BLOCK.forward_flops - 2 * _TOKENS * MB - 10**9
    assert attention_flops(sparse, replace(training, sequence_length=None)) == 0


@pytest.mark.parametrize("name", ["llama2-7b", "gpt3-6.7b", "bert-large"])
def test_attention_s_operations_are_those_of_scores_and_sums(name: str) -> None:
    """Two products of tokens × tokens × width a layer; a causal kernel does half of them."""
    model = load_model(name, Training(precision=Precision.BF16, sequence_length=512))
    block = model.layers[1]
    hidden = block.boundary_bytes // 2 // 512
    expected = 4 * 512 * 512 * hidden // (1 if name.startswith("bert") else 2)
    assert attention_flops(block, model.training) == pytest.approx(expected, rel=0.03)
    assert attention_flops(model.layers[-1], model.training) == 0


def test_wider_layers_reach_more_of_the_peak() -> None:
    training = Training(precision=Precision.BF16)
    shares = []
    for name in ("gpt2", "gpt2-medium", "gpt2-xl", "gpt3-6.7b", "gpt3-175b"):
        model = load_model(name, training)
        cost = CostModel(model=model, cluster=load_cluster("h100-8"), conventions=GALVATRON)
        shares.append(model.layers[1].forward_flops / cost.forward_s()[1] / 989e12)
    assert shares == sorted(shares)
    assert shares[0] < 0.25
    assert shares[-1] > 0.5


def test_part_of_a_roofline_is_refused() -> None:
    cluster = load_cluster("h100-8")
    broken = replace(cluster, device=replace(cluster.device, traffic=None))
    with pytest.raises(InvalidInput, match="some of bf16_products, bf16_attention, traffic and compiled_traffic"):
        dump_cluster(broken)
