"""Grades of recompute and offload, priced by hand for one layer on a small cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_layer import BLOCK, CLUSTER, MB, B, F, H

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import (
    Device,
    Kept,
    LayerGrade,
    LayerSpec,
    LayerTime,
    ModelProfile,
    ModelSpec,
    Strategy,
    Training,
)
from galvatron.planner.cost import GALVATRON, NEVER, CostModel, StageCosts
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import request_for

_BLOCK = replace(
    BLOCK,
    selective=Kept(split_bytes=40 * MB, replicated_bytes=4 * MB, flops=10**9),
    but_attention=Kept(split_bytes=8 * MB, sent_bytes=2 * MB, flops=7 * 10**9),
)
_HOST = replace(CLUSTER.device, host_bytes_per_s=1e10, host_memory_bytes=10**9)


def _stage(
    strategy: str,
    *,
    layer: LayerSpec = _BLOCK,
    device: Device = _HOST,
    profile: ModelProfile | None = None,
    degree: int = 1,
) -> StageCosts:
    model = ModelSpec(name="toy", family="custom", layers=(layer,) * 4, training=Training())
    cost = CostModel(model=model, cluster=replace(CLUSTER, device=device), conventions=GALVATRON, profile=profile)
    return cost.stage([Strategy.parse(strategy)], degree)


def _compute_s(strategy: str, samples: int, profile: ModelProfile | None = None) -> float:
    return float(_stage(strategy, profile=profile).layer_costs(np.array(samples)).compute_s[0, 0])


def _bytes(strategy: str, samples: int = 8) -> tuple[float, float]:
    """(saved, transient) of a sample on a device, in MB."""
    tables = _stage(strategy).tables(np.array(samples), np.array(1))
    local = samples / Strategy.parse(strategy).data_degree
    return float(tables.activation_bytes[0, 0]) / local / MB, float(tables.transient_bytes[0, 0]) / local / MB


_PLAIN = 2 * (F + B) + 3 * H  # two samples


def test_selective_recompute_moves_what_it_does_not_keep() -> None:
    """Two samples on each of 4 devices: a tenth of the operations again, and 51 of 100 MB written and read again."""
    again = 2 * F / 10 + H + 2 * 2 * 51e6 / 28e9
    assert _compute_s("dp4+rs", 8) == pytest.approx(_PLAIN + again)


def test_recompute_but_attention_repeats_its_share_of_the_operations() -> None:
    assert _compute_s("dp4+ra", 8) == pytest.approx(_PLAIN + 2 * F * 0.7 + H)


def test_what_is_measured_is_preferred() -> None:
    profile = ModelProfile(
        name="toy",
        times=(LayerTime(layer="block", forward_s=F, forward_fixed_s=H, backward_fixed_s=2 * H),),
        grades=(LayerGrade(layer="block", grade="rs", share=0.25, fixed_s=3e-4, activation_bytes=37 * MB),),
    )
    assert _compute_s("dp4+rs", 8, profile) == pytest.approx(_PLAIN + 2 * F * 0.25 + 3e-4)
    tables = _stage("dp4+rs", profile=profile).tables(np.array(8), np.array(1))
    assert int(tables.activation_bytes[0, 0]) == 2 * 37 * MB
    assert _compute_s("dp4+ra", 8, profile) == pytest.approx(_PLAIN + 2 * F * 0.7 + H), "that was not measured"


@pytest.mark.parametrize(
    ("strategy", "saved", "restored"),
    [
        ("dp4", 100, 0),
        ("dp4+rc", 5, 100),
        ("dp4+rs", 5 + 40 + 4, 51),
        ("dp4+ra", 5 + 8, 87),
        ("dp4+host", 0, 200),
        # Of 80 + 20 MB a rank of two saves 60; what ranks summed up is kept where there are ranks.
        ("dp2-tp2+rs", 5 + 20 + 4, 60 - 29),
        ("dp2-tp2+ra", 5 + 4 + 2, 60 - 11),
    ],
)
def test_what_stays(strategy: str, saved: int, restored: int) -> None:
    found, transient = _bytes(strategy)
    assert found == pytest.approx(saved)
    plain = _bytes(strategy.partition("+")[0])[1]
    assert transient - plain == pytest.approx(restored)


def test_offload_waits_for_what_the_link_cannot_move_in_time() -> None:
    """200 MB there beside a forward of 21 ms, and back beside a backward of 42 ms. Both are traffic of its memory."""
    traffic = 2 * 0.2e9 / _HOST.memory_bytes_per_s
    assert _compute_s("dp4+host", 8) == pytest.approx(_PLAIN + traffic), "20 ms each way at 10 GB/s"
    slow = replace(_HOST, host_bytes_per_s=2.5e9)
    costs = _stage("dp4+host", device=slow).layer_costs(np.array(8))
    assert float(costs.compute_s[0, 0]) == pytest.approx(_PLAIN + traffic + (0.08 - 2 * F - H) + (0.08 - 2 * B - 2 * H))


@pytest.mark.parametrize(("samples", "degree", "fits"), [(4, 1, True), (8, 1, False), (4, 2, False)])
def test_the_host_has_room_for_the_whole_model(samples: int, degree: int, fits: bool) -> None:
    """4 layers × 100 MB × 1 sample, twice; 1 GB is too little for 2 samples, or for two micro-batches in a pipeline."""
    strategy = "dp4+host" if degree == 1 else "dp2+host"
    tables = _stage(strategy, degree=degree).tables(np.array(samples // degree), np.array(2))
    assert (int(tables.time_ns[0, 0]) < NEVER) == fits


def test_where_the_link_is_unknown_nothing_is_offloaded() -> None:
    tables = _stage("dp4+host", device=CLUSTER.device).tables(np.array(8), np.array(1))
    assert int(tables.time_ns[0, 0]) == NEVER
    model = ModelSpec(name="toy", family="custom", layers=(_BLOCK,) * 4, training=Training())
    with pytest.raises(InvalidInput, match=r"does not say what device\.host_bandwidth and"):
        priced(Request(model=model, cluster=CLUSTER, batch=8), [["dp4+host"] * 4])
    with pytest.raises(InvalidInput, match="--offload needs the link to the host"):
        request_for(model, CLUSTER, {"offload": True})


def test_a_layer_of_which_nothing_is_known_is_kept_or_recomputed_whole() -> None:
    model = ModelSpec(name="toy", family="custom", layers=(BLOCK,) * 4, training=Training())
    with pytest.raises(InvalidInput, match=r"'dp4\+rs' cannot run it.*nobody knows what it keeps"):
        priced(Request(model=model, cluster=CLUSTER, batch=8), [["dp4+rs"] * 4])


def test_without_recompute_there_are_no_grades_of_it() -> None:
    model = ModelSpec(name="toy", family="custom", layers=(_BLOCK,) * 4, training=Training())
    assert request_for(model, CLUSTER, {}).effective_switches.selective_recompute
    without = request_for(model, CLUSTER, {"recompute": False}).effective_switches
    assert not without.selective_recompute
    assert not without.recompute_but_attention
    asked = request_for(model, CLUSTER, {"recompute": False, "selective_recompute": True}).effective_switches
    assert asked.selective_recompute
    assert not request_for(model, CLUSTER, {"paper": True}).effective_switches.selective_recompute
