"""What frozen parameters leave of a layer's price, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_layer import BLOCK, CLUSTER, LAT, MB, B, F, H, overlap

from galvatron.core.spec import LayerSpec, ModelSpec, Precision, Strategy, Training
from galvatron.core.spec.tuning import Tuning
from galvatron.planner.cost import GALVATRON, CostModel, StageCosts

_ALL = Tuning(frozen_parameters=41 * MB, frozen_replicated_parameters=1 * MB)
_FROZEN = replace(BLOCK, name="block+frozen", tuning=replace(_ALL, backward=False))
_PASSED = replace(BLOCK, name="block+passed", tuning=_ALL)
_HALF = replace(BLOCK, name="block+partly", tuning=Tuning(frozen_parameters=20 * MB))


def _stage(strategy: str, layer: LayerSpec, precision: Precision = Precision.FP32, degree: int = 1) -> StageCosts:
    training = Training(precision=precision, freeze=("x",))
    model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=training)
    return CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON).stage([Strategy.parse(strategy)], degree)


def _times(strategy: str, layer: LayerSpec) -> tuple[float, float]:
    """(steady, once) seconds of eight samples."""
    priced = _stage(strategy, layer).layer_costs(np.array(8))
    return float(np.broadcast_to(priced.steady_s, (1, 1))[0, 0]), float(np.broadcast_to(priced.once_s, (1, 1))[0, 0])


def test_without_backward_there_is_forward_alone() -> None:
    """Nothing is summed, stepped, recomputed; SDP gathers once, and TP sums in forward."""
    assert _times("dp4", _FROZEN) == pytest.approx((2 * F + H, 0))
    assert _times("dp4+rc", _FROZEN) == pytest.approx((2 * F + H, 0))
    assert _times("sdp4", _FROZEN) == pytest.approx((overlap(2 * F + H, 3 / 4 * 0.164 + 2 * LAT), 0))
    trained, frozen = (_times("tp4", layer)[0] for layer in (BLOCK, _FROZEN))
    reduce = 2 * (3 / 4 * 8 * 0.005 + 2 * LAT)
    assert frozen == pytest.approx(8 * F / 4 + H + 2 * reduce)
    assert trained == pytest.approx(8 * (F + B) / 4 + 3 * H + 4 * reduce)


def test_gradients_that_pass_cost_half_a_backward() -> None:
    steady, once = _times("dp4", _PASSED)
    assert steady == pytest.approx(2 * F + H + 2 * B / 2 + 2 * H)
    assert once == 0
    unit = 3 / 4 * 0.164 + 2 * LAT
    steady, once = _times("sdp4", _PASSED)
    assert steady == pytest.approx(overlap(2 * F + H, unit) + overlap(B + 2 * H, unit))


def test_only_what_trains_is_summed_and_stepped() -> None:
    backward = 2 * B * (1 - 10 / 41) + 2 * H
    steady, once = _times("dp4", _HALF)
    sync = 2 * (3 / 4 * 4 * 0.021 + 2 * LAT)
    assert steady == pytest.approx(2 * F + H + backward)
    assert once == pytest.approx(overlap(backward, sync) - backward + 21e6 * 28 / 28e9)


@pytest.mark.parametrize(
    ("strategy", "precision", "layer", "states"),
    [
        ("dp4", Precision.FP32, _FROZEN, 41 * 4),
        ("dp4", Precision.BF16, _FROZEN, 41 * 2),
        ("sdp4", Precision.BF16, _PASSED, 41 * 2 / 4),
        ("dp4+zero2", Precision.BF16, _PASSED, 41 * 2 * (1 / 4 + 1)),
        ("tp4", Precision.FP32, _FROZEN, (10 + 1) * 4),
        ("dp4", Precision.FP32, _HALF, 20 * 4 + 21 * 16),
        ("dp4", Precision.BF16, _HALF, 20 * 2 + 21 * 18),
        ("tp4", Precision.BF16, _HALF, 20 / 4 * 2 + (20 / 4 + 1) * 18),
    ],
)
def test_frozen_parameters_have_no_states(strategy: str, precision: Precision, layer: LayerSpec, states: float) -> None:
    """No gradient, no moments, and no wider master: the working parameter is all there is."""
    tables = _stage(strategy, layer, precision).tables(np.array(8), np.array(2))
    assert tables.state_bytes[0, 0] == states * MB


def test_nothing_is_saved_where_there_is_no_backward() -> None:
    for strategy in ("dp4", "dp4+rc", "tp4"):
        assert _stage(strategy, _FROZEN).tables(np.array(8), np.array(2)).activation_bytes[0, 0] == 0
    saved = [_stage("dp4", layer).tables(np.array(8), np.array(2)).activation_bytes for layer in (_PASSED, BLOCK)]
    assert saved[0] == saved[1]


def test_a_stage_that_does_not_train_receives_no_gradients() -> None:
    frozen, passed = (_stage("dp2", layer, degree=2) for layer in (_FROZEN, _PASSED))
    assert frozen.transfer_ns(4) == passed.transfer_ns(4)
    assert passed.gradient_transfer_ns(4) == passed.transfer_ns(4)
    assert not frozen.gradient_transfer_ns(4).any()


def test_layouts_change_one_way_alone() -> None:
    """From whole to divided rows nothing is sent forward, and a gather takes the gradients back."""

    def between(layer: LayerSpec) -> Any:
        model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training())
        stage = CostModel(model=model, cluster=CLUSTER, conventions=GALVATRON).stage(
            [Strategy.parse("tp4"), Strategy.parse("dp4")], 1
        )
        return stage.change_ns(4)[0]

    both, forward = between(_PASSED), between(_FROZEN)
    assert both[0, 1] == both[1, 0] > 0
    assert (forward[0, 1], forward[1, 0]) == (0, both[1, 0])


def test_the_stock_layer_is_found_again() -> None:
    adapted = replace(
        BLOCK,
        name="block+lora",
        parameters=43 * MB,
        replicated_parameters=2 * MB,
        forward_flops=11 * 10**9,
        replicated_activation_bytes=21 * MB,
        tuning=Tuning(
            frozen_parameters=41 * MB,
            adapter_parameters=2 * MB,
            adapter_replicated_parameters=1 * MB,
            adapter_flops=10**9,
            adapter_activation_bytes=1 * MB,
        ),
    )
    assert adapted.untuned() == _FROZEN.untuned() == BLOCK
