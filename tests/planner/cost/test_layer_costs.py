"""The formulas of docs/cost-model.md, worked out by hand for one layer on a small cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from toy_layer import BLOCK, CLUSTER, LAT, MB, B, F, H, overlap

from galvatron.core.spec import (
    GPIPE,
    ONE_F_ONE_B,
    LayerSpec,
    LayerTime,
    MeasuredGroup,
    ModelProfile,
    ModelSpec,
    Precision,
    Schedule,
    Strategy,
    TensorParallel,
    Training,
)
from galvatron.planner.cost import GALVATRON, NEVER, PAPER_SYSTEMS, Conventions, CostModel, StageCosts


def stage(
    *strategies: str,
    layer: LayerSpec = BLOCK,
    conventions: Conventions = GALVATRON,
    precision: Precision = Precision.FP32,
    degree: int = 1,
    profile: ModelProfile | None = None,
) -> StageCosts:
    model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training(precision=precision))
    cost = CostModel(model=model, cluster=CLUSTER, conventions=conventions, profile=profile)
    return cost.stage([Strategy.parse(text) for text in strategies], degree)


def times(costs: StageCosts, samples: int) -> tuple[float, float]:
    """(steady, once) seconds of the first strategy."""
    priced = costs.layer_costs(np.array(samples))
    shape = (1, len(costs.strategies))
    return float(np.broadcast_to(priced.steady_s, shape)[0, 0]), float(np.broadcast_to(priced.once_s, shape)[0, 0])


def test_data_parallel() -> None:
    """4 replicas, 8 samples: 2 each; 164 MB of gradients all-reduced beside backward; 41 M parameters updated."""
    backward = 2 * B + 2 * H
    sync = 2 * (3 / 4 * 0.164 + 2 * LAT)
    steady, once = times(stage("dp4"), 8)
    assert steady == pytest.approx(2 * F + H + backward)
    assert once == pytest.approx(overlap(backward, sync) - backward + 41e6 * 28 / 28e9)


def test_sharded_data_parallel_gathers_twice_and_scatters_once() -> None:
    forward, backward = 2 * F + H, 2 * B + 2 * H
    unit = 3 / 4 * 0.164 + 2 * LAT
    steady, once = times(stage("sdp4"), 8)
    assert steady == pytest.approx(overlap(forward, unit) + overlap(backward, 2 * unit))
    assert once == pytest.approx(41e6 / 4 * 28 / 28e9)


def test_paper_systems_wait_for_the_forward_gather() -> None:
    """Paper Section 3.4: forward 'directly sums up the computation and communication costs'."""
    unit = 3 / 4 * 0.164 + 2 * LAT
    steady, _ = times(stage("sdp4", conventions=PAPER_SYSTEMS), 8)
    assert steady == pytest.approx(2 * F + H + unit + overlap(2 * B + 2 * H, 2 * unit))


def test_tensor_parallel_reduces_four_times() -> None:
    """8 samples whole on each of 4 devices; weights and work divided by 4, 40 MB messages."""
    reduce = 2 * (3 / 4 * 0.040 + 2 * LAT)
    steady, once = times(stage("tp4"), 8)
    assert steady == pytest.approx(8 * F / 4 + H + 8 * B / 4 + 2 * H + 4 * reduce)
    assert once == pytest.approx((10e6 + 1e6) * 28 / 28e9)


def test_recompute_runs_forward_and_its_collectives_again() -> None:
    plain, _ = times(stage("tp4"), 8)
    again, _ = times(stage("tp4+rc"), 8)
    reduce = 2 * (3 / 4 * 0.040 + 2 * LAT)
    assert again - plain == pytest.approx(8 * F / 4 + H + 2 * reduce)


def test_sequence_parallel_gathers_inputs_again() -> None:
    plain, _ = times(stage("tp4"), 8)
    sequence, _ = times(stage("tp4+sp"), 8)
    assert sequence - plain == pytest.approx(2 * (3 / 4 * 0.040 + 2 * LAT))


def test_zero2_scatters_each_micro_batch_and_gathers_once() -> None:
    """Scatters beside backward, gathers beside the first micro-batch's forward."""
    forward, backward = 2 * F + H, 2 * B + 2 * H
    unit = 3 / 4 * 0.164 + 2 * LAT
    steady, once = times(stage("dp4+zero2"), 8)
    assert steady == pytest.approx(forward + overlap(backward, unit))
    assert once == pytest.approx(overlap(forward, unit) - forward + 41e6 / 4 * 28 / 28e9)


def test_hybrid_sharding_reduces_only_its_shard() -> None:
    """dp2-sdp2: SDP inside pairs, then all-reduce of half the gradients between them."""
    _, once = times(stage("dp2-sdp2"), 8)
    backward = 2 * B + 2 * H
    unit = 1 / 2 * 0.164 + LAT
    sync = 2 * (1 / 2 * 0.082 + LAT)
    assert once == pytest.approx(
        overlap(backward, 2 * unit + sync) - overlap(backward, 2 * unit) + 41e6 / 2 * 28 / 28e9
    )


def test_bf16_computes_and_gathers_in_half_the_time_but_reduces_in_fp32() -> None:
    forward, backward = 2 * F / 4 + H, 2 * B / 4 + 2 * H
    gather, scatter = 3 / 4 * 0.082 + 2 * LAT, 3 / 4 * 0.164 + 2 * LAT
    steady, _ = times(stage("sdp4", precision=Precision.BF16), 8)
    assert steady == pytest.approx(overlap(forward, gather) + overlap(backward, gather + scatter))


def test_measured_times_are_preferred() -> None:
    profile = ModelProfile(name="p", times=(LayerTime(layer="block", forward_s=0.5, backward_ratio=3.0),))
    steady, _ = times(stage("dp4", profile=profile), 8)
    assert steady == pytest.approx(2 * 0.5 + H + 2 * 1.5 + 2 * H)


@pytest.mark.parametrize(
    ("strategy", "least", "more_s"),
    [
        ("dp4", (0.5, 1.0), 0.0),  # both are below what two samples take
        ("dp4", (1.5, 1.0), 1.5 - 1.0 - H),
        ("dp4", (0.5, 4.0), 4.0 - 3.0 - 2 * H),
        ("dp4+rc", (1.5, 1.0), 2 * (1.5 - 1.0 - H)),
        ("dp4+zero2", (1.5, 4.0), 1.5 - 1.0 - H + 4.0 - 3.0 - 2 * H),  # what sharding adds comes on top of either
        ("tp4", (1.5, 4.0), 1.5 - 1.0 - H + 4.0 - 3.0 - 2 * H),  # not measured: a quarter of eight samples
    ],
)
def test_a_layer_takes_no_less_than_starting_its_kernels(
    strategy: str, least: tuple[float, float], more_s: float
) -> None:
    line = LayerTime(layer="block", forward_s=0.5, backward_ratio=3.0, forward_sharded_s=0.2, backward_sharded_s=0.3)
    never_less = replace(line, forward_least_s=least[0], backward_least_s=least[1])
    with_least, without = (
        times(stage(strategy, profile=ModelProfile(name="p", times=(time,))), 8)[0] for time in (never_less, line)
    )
    assert with_least - without == pytest.approx(more_s)


def test_each_collective_has_its_own_measured_figures() -> None:
    """Where a group was measured: SDP gathers at one speed and scatters at another, DP sums at a third."""
    group = MeasuredGroup(
        ranks=(0, 1, 2, 3), all_gather_bytes_per_s=2e9, all_gather_latency_s=1e-3, reduce_scatter_bytes_per_s=5e8,
        reduce_scatter_latency_s=2e-3, all_reduce_bytes_per_s=3e9, all_reduce_latency_s=3e-3,
    )  # fmt: skip
    cluster = replace(CLUSTER, groups=(group,))
    model = ModelSpec(name="toy", family="custom", layers=(BLOCK,) * 4, training=Training())

    def priced(strategy: str) -> tuple[float, float]:
        cost = CostModel(model=model, cluster=cluster, conventions=GALVATRON)
        return times(cost.stage([Strategy.parse(strategy)], 1), 8)

    forward, backward = 2 * F + H, 2 * B + 2 * H
    size = 4 * 41 * MB
    gather, scatter = 0.75 * size / 2e9 + 1e-3, 0.75 * size / 5e8 + 2e-3
    assert priced("sdp4")[0] == pytest.approx(overlap(forward, gather) + overlap(backward, gather + scatter))
    reduce = 2 * (0.75 * size / 3e9 + 3e-3)
    optimizer = 41 * MB * 28 / 28e9
    assert priced("dp4")[1] == pytest.approx(overlap(backward, reduce) - backward + optimizer)
    message = 2 * 5 * MB  # pairs were not measured: as the levels say
    pair = 2 * (0.5 * 2 * message / 1e9 + LAT)
    compute = 4 * (F + B) / 2 + 3 * H
    assert priced("dp2-tp2")[0] == pytest.approx(compute + 4 * pair)


def test_tables_amortise_once_over_micro_batches_and_round_up() -> None:
    costs = stage("dp4")
    steady, once = times(costs, 8)
    tables = costs.tables(np.array(8), np.array(4))
    assert tables.time_ns[0, 0] == math.ceil(round((steady + once / 4) * 1e9, 6))


@pytest.mark.parametrize(
    ("strategy", "states", "activations", "transient"),
    [
        ("dp4", 41 * 16, 2 * 100, 2 * 8),
        # Outside its split parts a layer works on whole tensors (messages of 5) all the same: on three, or all of 8.
        ("tp4", 11 * 16, 8 * (80 / 4 + 20), 8 * 8),
        # Along the sequence: the gathered tensor and its copy in order, and three parts of it.
        ("tp4+sp", 11 * 16, 8 * (80 + 20) / 4, 8 * (2 + 3 / 4) * 5),
        ("dp4+rc", 41 * 16, 2 * 5, 2 * (8 + 100)),
        ("tp4+sp+rc", 11 * 16, 8 * 5 / 4, 8 * ((2 + 3 / 4) * 5 + 100 / 4)),
        ("dp4+zero2", 41 * 16 / 4 + 41 * 4, 2 * 100, 2 * 8 + 41 * 4),
        ("sdp4", 41 * 16 / 4, 2 * 100, None),
        ("dp2-sdp2", 41 * 16 / 2, 2 * 100, None),
        ("sdp2-tp2", 21 * 16 / 2, 4 * (40 + 20), None),
    ],
)
def test_memory_by_strategy(strategy: str, states: float, activations: float, transient: float | None) -> None:
    """Megabytes for a micro-batch of 8 samples, one of two, from the shapes alone."""
    tables = stage(strategy).tables(np.array(8), np.array(2))
    assert tables.state_bytes[0, 0] == states * MB
    assert tables.activation_bytes[0, 0] == activations * MB
    if transient is not None:
        assert tables.transient_bytes[0, 0] == transient * MB


@pytest.mark.parametrize(
    ("strategy", "micro_batch", "late"),
    [
        ("sdp4", 8, 41 * 4 / 4),
        ("dp4+zero2", 8, 41 * 4 / 4),
        ("sdp2-tp2", 8, 21 * 4 / 2),
        ("sdp4+rc", 4, 5),  # of the layer's input only, which makes room for no more
        ("dp4", 8, 0),
        ("tp4", 8, 44),  # whole gradients that nobody sends
    ],
)
def test_shards_of_gradients_take_the_place_of_activations(strategy: str, micro_batch: int, late: float) -> None:
    """With one micro-batch no gradient is there before the activations that it is computed from are gone."""
    one, two = (stage(strategy).tables(np.array(micro_batch), np.array(count)).state_bytes[0, 0] for count in (1, 2))
    assert two - one == late * MB


def test_where_all_forwards_come_first_gradients_come_late_however_many_micro_batches_there_are() -> None:
    """Under GPipe the first gradient is made when a micro-batch's activations are gone, under 1F1B others come."""

    def states(schedule: Schedule, degree: int, micro_batches: int) -> float:
        model = ModelSpec(name="toy", family="custom", layers=(BLOCK, BLOCK), training=Training())
        cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON, schedule=schedule)
        tables = cost.stage([Strategy.parse("tp4")], degree).tables(np.array(8), np.array(micro_batches))
        return float(tables.state_bytes[-1, 0]) / MB

    assert states(GPIPE, 2, 3) == states(GPIPE, 2, 1) == states(ONE_F_ONE_B, 2, 1)
    assert states(ONE_F_ONE_B, 2, 3) - states(GPIPE, 2, 3) == 44
    assert states(GPIPE, 1, 3) == states(ONE_F_ONE_B, 1, 3), "without a pipeline each micro-batch is finished"


def test_ends_of_a_model_have_neighbours_of_their_own() -> None:
    """Under SDP the last layer has no other's gradient beside its own, and before the first nothing is gathered; the
    first one's shard of its gradient is made last of all."""
    end = replace(BLOCK, name="end", parameters=10 * MB)

    def transients(*layers: LayerSpec) -> dict[str, int]:
        model = ModelSpec(name="toy", family="custom", layers=layers, training=Training())
        cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON, profile=None)
        found = cost.stage([Strategy.parse("sdp4")], 1).tables(np.array(1), np.array(1)).transient_bytes[:, 0]
        return {kind.name: int(value) for kind, value in zip(model.kinds, found, strict=True)}

    work, activations = 8 / 4, 100 / 4  # megabytes of a quarter of a sample; what is gathered has 4 bytes a parameter
    whole, gradient = 10 * 4, 10 * 4 - work
    other = max(41 * 4 - activations, 0)
    first = transients(end, BLOCK, BLOCK)
    shard = 10 * 4 / 4
    assert first["end"] == (work + whole + gradient + other + shard) * MB
    last = transients(BLOCK, BLOCK, end)
    assert last["end"] == (work + whole + whole + gradient) * MB
    alone = transients(BLOCK)["block"] - 41 * 4 / 4 * MB
    assert first["block"] == last["block"] == alone + (41 * 4 + other) * MB


def test_sharded_layers_hold_gathered_parameters_while_they_run() -> None:
    """Under SDP at least the layer's whole parameters and whole gradient are alive beside its own work."""
    tables = stage("sdp4").tables(np.array(8), np.array(1))
    assert tables.transient_bytes[0, 0] >= (2 * 8 + 2 * 41 * 4) * MB


def test_bf16_keeps_a_working_copy_unless_sharded() -> None:
    replicated = stage("dp4", precision=Precision.BF16).tables(np.array(8), np.array(2))
    sharded = stage("sdp4", precision=Precision.BF16).tables(np.array(8), np.array(2))
    assert replicated.state_bytes[0, 0] == 41 * (16 + 2) * MB
    assert sharded.state_bytes[0, 0] == 41 * 16 / 4 * MB


def test_what_does_not_divide_is_never_chosen() -> None:
    """A batch that the data degree does not divide, heads that the tensor degree does not divide."""
    costs = stage("dp4", "tp4", "dp2-tp2")
    assert (costs.tables(np.array(6), np.array(1)).time_ns[0] >= NEVER).tolist() == [True, False, False]
    awkward = LayerSpec(
        name="block",
        parameters=MB,
        forward_flops=10**9,
        split_activation_bytes=MB,
        boundary_bytes=MB,
        tensor_parallel=TensorParallel(divides=(6,), forward_collectives=2, backward_collectives=2, message_bytes=MB),
    )
    costs = stage("dp4", "tp4", "dp2-tp2", layer=awkward)
    assert (costs.tables(np.array(8), np.array(1)).time_ns[0] >= NEVER).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("lengths", "never"),
    [((), [True, True]), ((512,), [False, False]), ((197,), [True, True]), ((512, 6), [True, False])],
)
def test_sequences_are_divided_only_where_there_are_some(lengths: tuple[int, ...], never: list[bool]) -> None:
    """Four-way and two-way: no sequences, one that divides, ViT's 197 tokens, two of which one only halves."""
    assert BLOCK.tensor_parallel is not None
    tensor = replace(BLOCK.tensor_parallel, sequence_divides=lengths)
    costs = stage("tp4+sp", "dp2-tp2+sp", "tp4", layer=replace(BLOCK, tensor_parallel=tensor))
    assert (costs.tables(np.array(8), np.array(1)).time_ns[0] >= NEVER).tolist() == [*never, False]


def test_tp_only_where_something_is_split() -> None:
    """A layer that cannot be split may lie between some that are; alone it has no use for TP, and where it shares a
    tied weight TP would leave that weight's gradient unsummed."""
    whole = replace(BLOCK, name="whole", tensor_parallel=None)
    strategies = tuple(Strategy.parse(text) for text in ("tp4", "tp4+sp", "dp4"))

    def never(*layers: LayerSpec) -> list[list[bool]]:
        model = ModelSpec(name="test", family="custom", layers=layers, training=Training())
        costs = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
        table: list[list[bool]] = (
            costs.stage(strategies, 1).tables(np.array(8), np.array(1)).time_ns >= NEVER
        ).tolist()
        return table

    assert never(whole) == [[True, True, False]]
    assert never(whole, BLOCK)[0] == [False, True, False]
    tied = replace(whole, name="tied", tied_parameters=1)
    assert never(whole, BLOCK, tied) == [[True, True, False], [False, True, False], [True, True, False]]


def test_layers_that_cannot_be_split_are_computed_whole() -> None:
    whole = LayerSpec(
        name="block", parameters=4 * MB, forward_flops=10**10, split_activation_bytes=MB, boundary_bytes=MB
    )
    costs = stage("tp4", layer=whole)
    steady, _ = times(costs, 8)
    assert steady == pytest.approx(8 * F + H + 8 * B + 2 * H)
    tables = costs.tables(np.array(8), np.array(2))
    assert tables.state_bytes[0, 0] == 64 * MB
    assert tables.activation_bytes[0, 0] == 8 * MB


def test_tied_weights_are_one_in_a_stage_and_two_in_a_pipeline() -> None:
    """A head tied to the embedding costs nothing beside it; in another stage it is a copy, synchronised each step."""
    embedding = LayerSpec(
        name="embedding", parameters=30 * MB, forward_flops=0, split_activation_bytes=MB, boundary_bytes=MB
    )
    tensor = TensorParallel(forward_collectives=0, backward_collectives=1, message_bytes=MB)
    head = LayerSpec(
        name="head",
        parameters=31 * MB,
        tied_parameters=30 * MB,
        forward_flops=10**9,
        split_activation_bytes=MB,
        boundary_bytes=MB,
        tensor_parallel=tensor,
    )
    model = ModelSpec(name="tied", family="custom", layers=(embedding, head), training=Training())
    assert model.parameters == 31 * MB
    cost = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON)
    alone = cost.stage([Strategy.parse("dp4")], 1)
    piped = cost.stage([Strategy.parse("dp2")], 2)
    assert alone.tables(np.array(8), np.array(1)).state_bytes[1, 0] == 16 * MB
    assert piped.tables(np.array(8), np.array(1)).state_bytes[1, 0] == 31 * 16 * MB
    sync = np.broadcast_to(piped.layer_costs(np.array(8)).sync_s, (2, 1))
    assert sync[1, 0] > 2 * (1 / 2 * 0.120 + LAT)
