"""What changing the form of activations between layers and moving them between stages costs, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from galvatron.core.spec import Cluster, Device, LayerSpec, Level, ModelSpec, Strategy, Training
from galvatron.planner.cost import GALVATRON, CostModel, StageCosts

MB = 10**6
LAYER = LayerSpec(name="block", parameters=MB, forward_flops=10**9, split_activation_bytes=MB, boundary_bytes=8 * MB)


def costs(*strategies: str, degree: int = 1, latency_s: float = 0.0) -> StageCosts:
    """Pairs of devices at 2 GB/s, and 1 GB/s (one link a pair) between the pairs."""
    device = Device(name="toy", memory_bytes=10**10, memory_bytes_per_s=1e12, fp32_flops_per_s=1e12)
    levels = (
        Level(name="pair", units=2, bytes_per_s=2e9, latency_s=latency_s, shared=False),
        Level(name="node", units=2, bytes_per_s=1e9, latency_s=latency_s, shared=True),
    )
    cluster = Cluster(name="toy", device=device, levels=levels, reserved_bytes=0)
    model = ModelSpec(name="toy", family="custom", layers=(LAYER,) * 2, training=Training())
    return CostModel(model=model, cluster=cluster, conventions=GALVATRON).stage(
        [Strategy.parse(text) for text in strategies], degree
    )


def change_ms(stage: StageCosts, source: str, target: str, samples: int = 4) -> float:
    names = [str(strategy) for strategy in stage.strategies]
    i, j = (int(stage.layout_of[names.index(name)]) for name in (source, target))
    return float(stage.change_ns(samples)[0, i, j]) / 1e6


def test_same_layout_is_free_whatever_the_strategy() -> None:
    stage = costs("dp4", "sdp4", "dp2-sdp2", "dp4+rc")
    assert len(stage.layouts) == 1
    assert not stage.change_ns(4).any()


def test_tensor_to_data_parallel_is_free_forward_and_gathers_backward() -> None:
    """The paper's free case (Section 4): TP4 to DP4 slices. Its backward gathers: each rank lacks 3/4 of 32 MB.

    The ring over all four devices is as slow as the link between the pairs: 24 MB at 1 GB/s.
    """
    stage = costs("tp4", "dp4")
    assert change_ms(stage, "tp4", "dp4") == pytest.approx(24.0)
    assert change_ms(stage, "dp4", "tp4") == pytest.approx(24.0)


def test_partial_gathers_span_only_the_digits_that_change() -> None:
    """dp2-tp2 splits the batch between the pairs, dp4 inside them too: backward gathers 8 of 16 MB inside a pair."""
    stage = costs("dp2-tp2", "dp4")
    assert change_ms(stage, "dp2-tp2", "dp4") == pytest.approx(8 / 2)


def test_both_directions_gather_where_neither_layout_contains_the_other() -> None:
    """dp2-tp2 to tp2-dp2: forward gathers across the pairs, backward inside.

    Forward: each rank ends with half of the batch, 16 MB, and lacks half of that; the two groups that cross share a
    1 GB/s link, so 8 MB at 0.5 GB/s. Backward: 8 MB at 2 GB/s inside a pair.
    """
    stage = costs("dp2-tp2", "tp2-dp2")
    assert change_ms(stage, "dp2-tp2", "tp2-dp2") == pytest.approx(8 / 0.5 + 8 / 2)


def test_divided_sequences_are_gathered_before_layers_that_need_them_whole() -> None:
    """tp4+sp to tp4: forward each rank lacks 3/4 of 32 MB, at the 1 GB/s between the pairs; backward slices."""
    stage = costs("tp4", "tp4+sp", "tp4+sp+rc")
    assert len(stage.layouts) == 2
    assert change_ms(stage, "tp4+sp", "tp4") == pytest.approx(24.0)
    assert change_ms(stage, "tp4", "tp4+sp") == pytest.approx(24.0)
    assert change_ms(stage, "tp4+sp", "tp4+sp+rc") == 0


def test_a_rank_gathers_only_the_sequences_of_its_own_rows() -> None:
    """dp2-tp2+sp to dp2-tp2: half of the batch is 16 MB, and a rank lacks half of that, at 2 GB/s inside a pair."""
    stage = costs("dp2-tp2", "dp2-tp2+sp")
    assert change_ms(stage, "dp2-tp2+sp", "dp2-tp2") == pytest.approx(8 / 2)


def test_sequences_are_whole_while_rows_change() -> None:
    """dp2-tp2+sp to dp4: forward gathers 8 of 16 MB inside a pair, then slices rows; backward gathers rows there, 8 of
    16 MB, then slices sequences. To tp2-dp2+sp: both directions gather sequences and then rows.

    Forward: 8 MB of sequences at 2 GB/s inside a pair, 8 MB of rows at 0.5 GB/s across; backward: 8 MB of sequences at
    0.5 GB/s across, 8 MB of rows at 2 GB/s inside.
    """
    stage = costs("dp2-tp2+sp", "dp4", "tp2-dp2+sp")
    assert change_ms(stage, "dp2-tp2+sp", "dp4") == pytest.approx(8 / 2 + 8 / 2)
    assert change_ms(stage, "dp2-tp2+sp", "tp2-dp2+sp") == pytest.approx(2 * (8 / 2 + 8 / 0.5))


def test_latency_is_paid_once_a_gather_step() -> None:
    stage = costs("tp4", "dp4", latency_s=1e-3)
    assert change_ms(stage, "tp4", "dp4") == pytest.approx(24.0 + 2 * 1.0)
    stage = costs("tp4+sp", "dp4", latency_s=1e-3)
    assert change_ms(stage, "tp4+sp", "dp4") == pytest.approx(2 * (24.0 + 2 * 1.0))


def test_stage_transfers_carry_only_the_rows_a_layout_needs() -> None:
    """Two stages of two devices: dp2 receives 2 of 4 samples a device, tp2 all 4, tp2+sp half of each; two transfers
    share the link."""
    stage = costs("dp2", "tp2", "tp2+sp", degree=2)
    by_layout = {
        str(s): float(stage.transfer_ns(4)[0, stage.layout_of[i]]) / 1e6 for i, s in enumerate(stage.strategies)
    }
    assert by_layout == {
        "dp2": pytest.approx(2 * 8 / 0.5),
        "tp2": pytest.approx(4 * 8 / 0.5),
        "tp2+sp": pytest.approx(4 * 4 / 0.5),
    }
    assert not costs("dp4").transfer_ns(4).any()
    assert np.issubdtype(stage.transfer_ns(4).dtype, np.integer)
