"""What experts with axes of their own add to a layer, worked out by hand (docs/cost-model.md, "Experts").

The layer: 41 million parameters, of which 32 million are of 8 experts. Its work is half that of its experts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_layer import BLOCK, CLUSTER, LAT, MB, B, F, H, overlap

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Context, Experts, LayerSpec, ModelSpec, Precision, Strategy, Training
from galvatron.planner.cost import GALVATRON, NEVER, CostModel, LayerCosts, StageCosts, Tables

EXPERTS = Experts(
    count=8,
    parameters=32 * MB,
    forward_flops=5 * 10**9,
    activation_bytes=40 * MB,
    replicated_activation_bytes=8 * MB,
    dispatch_bytes=10 * MB,
    divides=(6,),
    imbalance=1.25,
)
LAYER = replace(BLOCK, experts=EXPERTS)
A2A = 3 / 4 * 0.010 * 1.25 + 2 * LAT  # over four devices, for one sample: 10 MB at 1 GB/s, the busiest a quarter more

COUNTS = 2 * LAT  # of a forward: how many copies will come


def stage(*strategies: str, layer: LayerSpec = LAYER, precision: Precision = Precision.FP32) -> StageCosts:
    model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training(precision=precision))
    cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
    return cost.stage([Strategy.parse(text) for text in strategies], 1)


def costs(strategy: str, samples: int) -> LayerCosts:
    """Seconds of one strategy, each a single number."""
    priced = stage(strategy).layer_costs(np.array(samples))
    return LayerCosts(**{name: np.ravel(getattr(priced, name))[0] for name in LayerCosts.__slots__})


def tables(strategy: str, samples: int, precision: Precision = Precision.FP32, micro_batches: int = 4) -> Tables:
    found = stage(strategy, precision=precision).tables(np.array(samples), np.array(micro_batches))
    return Tables(**{name: getattr(found, name)[0, 0] for name in Tables.__slots__})


def test_tokens_travel_there_and_back_in_forward_and_in_backward() -> None:
    assert costs("dp4/ep4", 4).ep_s == pytest.approx(4 * A2A + COUNTS)
    assert costs("dp4/ep4+rc", 4).ep_s == pytest.approx(6 * A2A + 2 * COUNTS)
    assert costs("dp4/ep4", 8).ep_s == pytest.approx(4 * (2 * (A2A - 2 * LAT) + 2 * LAT) + COUNTS)
    assert costs("dp4", 4).ep_s == 0


def test_the_busiest_device_does_more_of_the_experts_work() -> None:
    """Half of the work is the experts', and the busiest does a quarter more of it."""
    busier = 1 + 0.5 * 0.25
    assert costs("dp4/ep4", 4).compute_s == pytest.approx((F + B) * busier + 3 * H)
    assert costs("dp2-tp2/ep4", 4).compute_s == pytest.approx((F + B) * busier + 3 * H)
    alone = stage("tp4", "tp4/ep4", layer=replace(LAYER, tensor_parallel=None, replicated_parameters=41 * MB))
    whole, apart = np.ravel(alone.layer_costs(np.array(4)).compute_s)
    assert whole == pytest.approx(4 * (F + B) + 3 * H)  # each rank computes all of it
    assert apart == pytest.approx(4 * (F + B) * (0.5 + 0.5 * 1.25 / 4) + 3 * H)


def test_ranks_with_the_same_tokens_take_a_slice_each() -> None:
    """TP 2, two samples on each pair: each rank sends one sample's copies, and the pair gathers 2 · 5 MB at the end.
    The layer's all-reduce of the experts is gone."""
    gather = 1 / 2 * 0.010 + LAT
    assert costs("dp2-tp2/ep4", 4).ep_s == pytest.approx(2 * (2 * A2A + gather) + COUNTS)
    assert costs("dp2-tp2/ep4", 4).tp_s == pytest.approx(costs("dp2-tp2", 4).tp_s / 2)


def test_experts_split_by_tp_sum_what_they_compute() -> None:
    """EP 2 over the pairs, TP 2 inside: both ranks of a pair send both samples' copies. They sum tokens (2 · 5 MB): the
    router's weights have made one of a token's copies before."""
    to_pair = 1 / 2 * 0.020 * 1.25 + LAT
    reduce = 2 * (1 / 2 * 0.010 + LAT)
    assert costs("dp2-tp2/ep2-tp2", 4).ep_s == pytest.approx(2 * (2 * to_pair + reduce) + LAT)


def test_a_divided_sequence_needs_no_gathering() -> None:
    layer = replace(LAYER, tensor_parallel=replace(BLOCK.tensor_parallel, sequence_divides=(8,)))  # type: ignore[type-var]
    plain = np.ravel(stage("dp2-tp2/ep4+sp", layer=layer).layer_costs(np.array(4)).ep_s)
    assert plain == pytest.approx(4 * A2A + COUNTS)
    with pytest.raises(InvalidInput, match="hold different tokens under \\+sp; leave one of them out"):
        Strategy.parse("dp2-tp2/ep2-tp2+sp")


def test_gradients_of_experts_are_summed_over_their_own_replicas() -> None:
    """9 million dense parameters over DP 4 beside the experts' backward, 16 million over DP 2 beside the rest's."""
    experts = overlap(B / 2, 2 * (1 / 2 * 4 * 0.016 + LAT)) - B / 2
    dense = overlap(B / 2 * 1.25, 2 * (3 / 4 * 4 * 0.009 + 2 * LAT)) - B / 2 * 1.25
    assert costs("dp4/dp2-ep2", 4).sync_s == pytest.approx(experts + dense)
    assert costs("dp4/ep4", 4).sync_s == pytest.approx(dense)


def test_gradients_of_the_rest_do_not_slow_its_exchanges() -> None:
    """They are in flight while the experts compute."""
    long = Context(length=64, heads=8, key_value_heads=8, attention_flops=10**9, query_bytes=MB, key_value_bytes=2 * MB)
    layer = replace(LAYER, context=long)
    found = {text: stage(text, layer=layer).layer_costs(np.array(4)) for text in ("ulysses4/ep4", "ulysses4")}
    dense = overlap(B / 2 * 1.25, 2 * (3 / 4 * 4 * 0.009 + 2 * LAT)) - B / 2 * 1.25
    assert np.ravel(found["ulysses4/ep4"].sync_s)[0] == pytest.approx(dense)
    exchanged = [np.ravel(costs.cp_s)[0] for costs in found.values()]
    assert exchanged[0] == pytest.approx(exchanged[1])
    assert exchanged[0] > 0


def test_sharded_experts_gather_and_scatter_in_each_micro_batch() -> None:
    gather, scatter = 1 / 2 * 4 * 0.016 + LAT, 1 / 2 * 4 * 0.016 + LAT
    exposed = overlap(F / 2, gather) - F / 2 + overlap(B / 2, gather + scatter) - B / 2
    assert costs("dp4/sdp2-ep2", 4).sdp_s == pytest.approx(exposed)
    assert costs("dp4/ep4", 4).sdp_s == 0


def test_states_are_divided_by_ep_and_tp_and_sharded_by_sdp() -> None:
    assert tables("dp4/ep4", 4).state_bytes == 16 * (9 + 8) * MB
    assert tables("dp4/dp2-ep2", 4).state_bytes == 16 * (9 + 16) * MB
    assert tables("dp4/sdp2-ep2", 4).state_bytes == 16 * (9 + 8) * MB
    assert tables("dp2-tp2/ep2-tp2", 4).state_bytes == 16 * (4 + 1 + 8) * MB
    assert tables("dp4/ep4", 4, Precision.BF16).state_bytes == 18 * (9 + 8) * MB
    assert tables("dp4/sdp2-ep2", 4, Precision.BF16).state_bytes == 18 * 9 * MB + 16 * 8 * MB
    late = tables("dp4/sdp2-ep2", 4, micro_batches=1).state_bytes  # the place of 4 · 8 MB is made when tokens are gone
    assert late == 16 * (9 + 8) * MB - 32 * MB


def test_activations_of_the_busiest_device() -> None:
    """Of 100 MB a sample 48 are the experts': 40 inside them, 8 of copies."""
    assert tables("dp4", 4).activation_bytes == 100 * MB
    assert tables("dp4/ep4", 4).activation_bytes == (52 + 1.25 * 48) * MB
    assert tables("dp2-tp2/ep4", 4).activation_bytes == 2 * (40 / 2 + 12) * MB + 1.25 * 48 * MB
    assert tables("dp2-tp2/ep2-tp2", 4).activation_bytes == 2 * (40 / 2 + 12) * MB + 1.25 * 2 * (40 / 2 + 8) * MB
    assert tables("dp4/ep4+rc", 4).activation_bytes == 5 * MB


def test_transients_hold_copies_of_tokens_and_gathered_experts() -> None:
    work = 1.25 * 8 + 2.25 * 10  # gradients inside the layer, and copies sent and received
    assert tables("dp4/ep4", 4).transient_bytes == work * MB
    assert tables("dp4/ep4+rc", 4).transient_bytes == (work + 52 + 60) * MB
    gathered = 4 * 16 + max(4 * 16 / 3, 4 * 16 - work) + max(4 * 16 - 60, 0)
    assert tables("dp4/sdp2-ep2", 4).transient_bytes == pytest.approx((work + gathered) * MB)


@pytest.mark.parametrize(
    ("strategy", "allowed"), [("dp4/ep4", True), ("tp4/ep4", True), ("tp4/ep2-tp2", True), ("dp4/dp2-ep2", True)]
)
def test_which_axes_divide_the_experts(strategy: str, allowed: bool) -> None:
    few = replace(LAYER, experts=replace(EXPERTS, count=2, divides=(3,)))
    assert (stage(strategy).tables(np.array(4), np.array(1)).time_ns[0, 0] < NEVER) == allowed
    divisible = strategy == "dp4/dp2-ep2"
    assert (stage(strategy, layer=few).tables(np.array(4), np.array(1)).time_ns[0, 0] < NEVER) == divisible
    assert stage(strategy, layer=BLOCK).tables(np.array(4), np.array(1)).time_ns[0, 0] >= NEVER, "no experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": 41 * MB}, r"experts\.parameters is 41000000; expected from 0 to 40000000"),
        ({"forward_flops": 10**11}, r"experts\.forward_flops"),
        ({"activation_bytes": 81 * MB}, r"experts\.activation_bytes is 81000000; expected from 0 to 80000000"),
        ({"replicated_activation_bytes": 21 * MB}, r"experts\.replicated_activation_bytes"),
        ({"imbalance": 0.5}, "imbalance is 0.5; expected a number from 1"),
        ({"count": 0}, "count is 0; expected a whole number from 1"),
    ],
)
def test_figures_of_experts_are_part_of_the_layers(change: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(LAYER, experts=replace(EXPERTS, **change))  # type: ignore[arg-type]
