"""What context parallelism costs, worked out by hand for one layer on a small cluster (docs/cost-model.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_layer import BLOCK, CLUSTER, LAT, MB, B, F, H, overlap

from galvatron.core.spec import (
    Cluster,
    Context,
    Kind,
    LayerSpec,
    Level,
    MeasuredGroup,
    ModelSpec,
    Precision,
    Strategy,
    Training,
)
from galvatron.planner.cost import GALVATRON, CostModel, LayerCosts, StageCosts, Tables

_LONG = replace(
    BLOCK,
    context=Context(
        length=64,
        heads=8,
        key_value_heads=4,
        attention_flops=BLOCK.forward_flops // 2,
        query_bytes=4 * MB,
        key_value_bytes=2 * MB,
    ),
)
_PASS = 2 * 2e-3 + LAT  # keys and values of two samples' worth of tokens to the next rank
_TOUCH = 8e6 / 28e9  # one fp32 cell for each of their queries' 2 million values


def _stage(text: str, layer: LayerSpec = _LONG, precision: Precision = Precision.FP32) -> StageCosts:
    model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training(precision=precision))
    cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
    return cost.stage([Strategy.parse(text)], 1)


def _costs(text: str, samples: int = 8, layer: LayerSpec = _LONG, precision: Precision = Precision.FP32) -> LayerCosts:
    return _stage(text, layer, precision).layer_costs(np.array(samples))


def _seconds(table: np.typing.NDArray[np.float64]) -> float:
    return float(np.broadcast_to(table, (1, 1))[0, 0])


def test_a_rank_computes_its_share_of_the_layer() -> None:
    for text in ("ring4", "ulysses4", "ring2-ulysses2", "dp2-ring2", "ulysses2-tp2"):
        assert _seconds(_costs(text).compute_s) == pytest.approx(2 * F + H + 2 * B + 2 * H), text


def test_keys_and_values_go_round_beside_attention() -> None:
    """Half of the layer is attention: F forward and B backward for two samples' worth of tokens, in four equal steps.
    Three passes forward; three of keys, values and their gradients backward, and one of gradients more. Merging
    touches 8 cells a value in 13/4 steps' worth of queries, adding 3 of queries, keys and values."""
    forward = overlap(3 / 4 * F, 3 * _PASS) - 3 / 4 * F + 8 * 13 / 4 * _TOUCH
    backward = overlap(3 / 4 * B, 3 * 2 * _PASS) - 3 / 4 * B + _PASS + 3 * 13 / 4 * 1.5 * _TOUCH
    assert _seconds(_costs("ring4").cp_s) == pytest.approx(forward + backward)
    assert _seconds(_costs("ring4+rc").cp_s) == pytest.approx(2 * forward + backward), "forward runs again"
    assert _seconds(_costs("ring4").tp_s) == 0


def test_full_attention_has_all_queries_in_each_step() -> None:
    assert _LONG.context is not None
    full = replace(_LONG, context=replace(_LONG.context, causal=False))
    more = (8 + 3 * 1.5) * (4 - 13 / 4) * _TOUCH
    assert _seconds(_costs("ring4", layer=full).cp_s) - _seconds(_costs("ring4").cp_s) == pytest.approx(more)


def test_gradients_of_keys_and_values_travel_in_fp32() -> None:
    """In bf16 they are twice as large as keys and values; attention takes a quarter of the time."""
    sums = 2 * _PASS - LAT
    forward = overlap(3 / 16 * F, 3 * _PASS) - 3 / 16 * F + 8 * 13 / 4 * 2 * _TOUCH
    backward = overlap(3 / 16 * B, 3 * (_PASS + sums)) - 3 / 16 * B + sums + 3 * 13 / 4 * 3 * _TOUCH
    assert _seconds(_costs("ring4", precision=Precision.BF16).cp_s) == pytest.approx(forward + backward)


def test_heads_are_exchanged_for_tokens_and_back() -> None:
    """Queries and the result (8 MB), keys and values (2 MB each) of two samples' worth of tokens, there and back."""
    once = 2 * (3 / 4 * 8e-3 + 2 * LAT) + 2 * (3 / 4 * 2e-3 + 2 * LAT)
    assert _seconds(_costs("ulysses4").cp_s) == pytest.approx(2 * once)
    assert _seconds(_costs("ulysses4+rc").cp_s) == pytest.approx(3 * once)


def test_tensor_parallelism_divides_heads_before() -> None:
    """Two ranks have 8 · ½ samples' worth of tokens each, and half of the heads."""
    once = 2 * (1 / 2 * 8e-3 + LAT) + 2 * (1 / 2 * 2e-3 + LAT)
    assert _seconds(_costs("ulysses2-tp2").cp_s) == pytest.approx(2 * once)


def test_a_mixture_exchanges_and_passes() -> None:
    exchange = 2 * (1 / 2 * 8e-3 + LAT) + 2 * (1 / 2 * 2e-3 + LAT)
    forward = overlap(1 / 2 * F, _PASS) - 1 / 2 * F + 8 * 7 / 4 * _TOUCH
    backward = overlap(1 / 2 * B, 2 * _PASS) - 1 / 2 * B + _PASS + 3 * 7 / 4 * 1.5 * _TOUCH
    assert _seconds(_costs("ring2-ulysses2").cp_s) == pytest.approx(2 * exchange + forward + backward)


def test_layers_without_attention_exchange_nothing() -> None:
    plain = replace(BLOCK, context=Context(length=64))
    for text in ("ring4", "ulysses4", "ring2-ulysses2", "ring4+zero3"):
        assert _seconds(_costs(text, layer=plain).cp_s) == 0


@pytest.mark.parametrize(
    ("context", "data"),
    [("ring4", "dp4"), ("ulysses4+zero2", "dp4+zero2"), ("ring2-ulysses2+zero3", "sdp4"), ("sdp2-ring2", "sdp4"),
     ("dp2-ulysses2", "dp4"), ("dp2-ring2+zero2", "dp4+zero2")],
)  # fmt: skip
def test_parameters_are_shared_over_context_as_over_data(context: str, data: str) -> None:
    """Gradients, states and the optimizer's step are as with data parallelism over as many devices; layers without
    attention exchange nothing that messages could slow down."""
    plain = replace(BLOCK, context=Context(length=64))
    one, other = _costs(context, layer=plain), _costs(data, layer=plain)
    for name in ("sync_s", "sdp_s", "optimizer_s"):
        assert _seconds(getattr(one, name)) == pytest.approx(_seconds(getattr(other, name))), name
    tables, others = (_tables(text) for text in (context, data))
    assert tables.state_bytes == others.state_bytes


_C = 2 * B + 2 * H  # backward of two samples' worth of tokens
_X = 2 * (3 / 4 * 8e-3 + 2 * LAT) + 2 * (3 / 4 * 2e-3 + 2 * LAT)  # Ulysses over four


def _sum_s(layer: LayerSpec) -> float:
    """What summing its gradients over four takes by itself: of data parallelism half of it shows, while it is short."""
    hidden = _seconds(_costs("dp4", layer=layer).sync_s)
    assert 0 < hidden < 0.5 * _C
    return 2 * hidden


_SMALL = replace(_LONG, parameters=3 * MB, replicated_parameters=1 * MB)


def test_sums_slow_exchanges_down_while_they_last() -> None:
    """Of a backward pass of computing and exchanging, the part beside the sums: there exchanges take twice as long, and
    computing half as long again."""
    slower = _sum_s(_SMALL) / (_C + _X) * (_X + 0.5 * _C)
    assert _seconds(_costs("ulysses4", layer=_SMALL).sync_s) == pytest.approx(slower)
    assert _seconds(_costs("ulysses4", layer=_SMALL).cp_s) == pytest.approx(2 * _X), "exchanges alone stay as they are"


@pytest.mark.parametrize("share", [1.0, 0.2], ids=["messages are longer", "attention is longer"])
def test_sums_slow_a_ring_down_where_attention_does_not_hide_it(share: float) -> None:
    """While they last, what goes round takes twice as long. They get what it leaves of the link."""
    assert _SMALL.context is not None
    size = int(2 * share * MB)
    layer = replace(_SMALL, context=replace(_SMALL.context, key_value_bytes=size))
    once = 2 * size / 1e9 + LAT
    rest = _C - 3 / 4 * B + 3 * 13 / 4 * (1 + share / 2) * _TOUCH
    alone = rest + overlap(3 / 4 * B, 3 * 2 * once) + once
    twice = rest + overlap(3 / 4 * B, 2 * 3 * 2 * once) + 2 * once
    slower = _sum_s(layer) / (twice - 7 * once) * (twice + 0.5 * _C - alone)
    assert (2 * 6 * once < 3 / 4 * B) == (share < 1)
    assert _seconds(_costs("ring4", layer=layer).sync_s) == pytest.approx(slower)


def test_each_pass_hides_its_own_ring() -> None:
    """In bf16 attention hides what goes round forward, but not backward, where gradients are twice as large. What
    attention has left in the recomputed forward pass does not help backward."""
    assert _LONG.context is not None
    layer = replace(_LONG, context=replace(_LONG.context, key_value_bytes=MB // 5))
    once = 2 * 0.2e-3 + LAT
    sums = 2 * once - LAT
    assert 3 * once < 3 / 16 * F
    assert 3 * (once + sums) > 3 / 16 * B
    forward = 0.5 * 3 * once + 8 * 13 / 4 * 2 * _TOUCH
    backward = overlap(3 / 16 * B, 3 * (once + sums)) - 3 / 16 * B + sums + 3 * 13 / 4 * 2.1 * _TOUCH
    found = _seconds(_costs("ring4+rc", layer=layer, precision=Precision.BF16).cp_s)
    assert found == pytest.approx(2 * forward + backward)


def test_sums_that_last_longer_are_waited_for() -> None:
    """All exchanges wait for half of the link, as if sums and exchanges came one after the other."""
    sums = 2 * (3 / 4 * 4 * _LONG.parameters / 1e9 + 2 * LAT)
    assert sums > _C + _X
    assert _seconds(_costs("ulysses4").sync_s) == pytest.approx(sums - 0.5 * _C)


@pytest.mark.parametrize("measured", [1.0, 3.0])
def test_a_cluster_says_how_much_slower_exchanges_are(measured: float) -> None:
    """They get 1/μ of the link, and what they leave is for the sums."""
    slower = _sum_s(_SMALL) / (_C + (measured - 1) * _X) * ((measured - 1) * _X + 0.5 * _C)
    assert _seconds(_beside(measured, _SMALL).sync_s) == pytest.approx(slower)


def _beside(contention: float, layer: LayerSpec) -> LayerCosts:
    model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training(precision=Precision.FP32))
    cost = CostModel(model=model, cluster=replace(CLUSTER, message_contention=contention), conventions=GALVATRON)
    return cost.stage([Strategy.parse("ulysses4")], 1).layer_costs(np.array(8))


@pytest.mark.parametrize("parameters", [0.1, 1, 3, 10, 40])
def test_nothing_takes_longer_than_one_after_the_other(parameters: float) -> None:
    """Even where exchanges wait for all sums that are queued."""
    layer = replace(_LONG, parameters=int(parameters * MB), replicated_parameters=0)
    sums = 2 * (3 / 4 * 4 * layer.parameters / 1e9 + 2 * LAT)
    found = [_seconds(_beside(contention, layer).sync_s) for contention in (1.0, 2.0, 4.0, 8.0)]
    assert np.all(np.diff(found) > -1e-9)
    assert found[-1] <= sums + 1e-9


def _tables(text: str, layer: LayerSpec = _LONG) -> Tables:
    return _stage(text, layer).tables(np.array(8), np.array(2))


def test_activations_are_those_of_a_ranks_tokens() -> None:
    """Two samples' worth of 100 MB, and the result of attention once more: the kernel keeps it as it made it."""
    assert int(_tables("ring4").activation_bytes[0, 0]) == 2 * (100 + 4) * MB
    assert int(_tables("ulysses4").activation_bytes[0, 0]) == 2 * (100 + 4) * MB
    assert int(_tables("ring4+rc").activation_bytes[0, 0]) == 2 * 5 * MB
    assert int(_tables("ulysses2-tp2+sp").activation_bytes[0, 0]) == 4 * (100 + 4) * MB // 2
    plain = replace(BLOCK, context=Context(length=64))
    assert int(_tables("ring4", plain).activation_bytes[0, 0]) == 2 * 100 * MB


def _cluster(shared: bool) -> Cluster:
    """Four devices a node, two nodes."""
    levels = (
        Level(name="node", units=4, bytes_per_s=100.0, latency_s=1.0, shared=False),
        Level(name="net", units=2, bytes_per_s=40.0, latency_s=5.0, shared=shared),
    )
    return replace(CLUSTER, levels=levels)


@pytest.mark.parametrize(
    ("text", "shared", "bytes_per_s", "latency_s"),
    [
        ("dp2-ring4", True, 100.0, 1.0),
        ("ring2-dp4", True, 10.0, 5.0),  # four rings leave each node
        ("ring2-dp4", False, 40.0, 5.0),
        ("ring8", True, 40.0, 5.0),  # one of its ranks leaves each node
        ("ring8", False, 40.0, 5.0),
    ],
)
def test_what_a_ring_gets_from_its_links(text: str, shared: bool, bytes_per_s: float, latency_s: float) -> None:
    link = _cluster(shared).pass_link(Strategy.parse(text).factors(Kind.RING))
    assert (link.bytes_per_s, link.latency_s) == (bytes_per_s, latency_s)


def test_a_measured_group_says_what_a_ring_gets() -> None:
    measured = MeasuredGroup(
        ranks=(0, 1),
        all_gather_bytes_per_s=7.0,
        all_gather_latency_s=3.0,
        reduce_scatter_bytes_per_s=1.0,
        reduce_scatter_latency_s=1.0,
        all_reduce_bytes_per_s=1.0,
        all_reduce_latency_s=1.0,
    )
    link = replace(CLUSTER, groups=(measured,)).pass_link(Strategy.parse("dp2-ring2").factors(Kind.RING))
    assert (link.bytes_per_s, link.latency_s) == (7.0, 3.0)
