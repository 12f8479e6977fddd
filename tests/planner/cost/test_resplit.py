"""Borrowing a tied weight that its owner splits differently, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from galvatron.core.spec import Cluster, Device, LayerSpec, Level, ModelSpec, Strategy, TensorParallel, Training
from galvatron.planner.cost import GALVATRON, PAPER_SYSTEMS, Conventions, CostModel, StageCosts
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request

MB = 10**6
CLUSTER = Cluster(
    name="toy-4",
    device=Device(name="toy", memory_bytes=10**12, memory_bytes_per_s=28e9, fp32_flops_per_s=1e12),
    levels=(Level(name="node", units=4, bytes_per_s=1e9, latency_s=1e-4, shared=False),),
    reserved_bytes=0,
    overlap_slowdown=1.0,
)
TENSOR = TensorParallel(forward_collectives=0, backward_collectives=0, message_bytes=0)
EMBEDDING = LayerSpec(
    name="embedding",
    parameters=30 * MB,
    forward_flops=10**9,
    split_activation_bytes=MB,
    boundary_bytes=MB,
    tensor_parallel=TENSOR,
)
HEAD = LayerSpec(
    name="head",
    parameters=30 * MB,
    tied_parameters=30 * MB,
    forward_flops=10**9,
    split_activation_bytes=MB,
    boundary_bytes=MB,
    transient_bytes=60 * MB,
    tensor_parallel=TENSOR,
)
MODEL = ModelSpec(name="tied", family="custom", layers=(EMBEDDING, HEAD), training=Training())
WHOLE = 4 * 30 * MB


def _costs(*strategies: str, conventions: Conventions = GALVATRON) -> StageCosts:
    cost = CostModel(model=MODEL, cluster=CLUSTER, conventions=conventions)
    return cost.stage([Strategy.parse(text) for text in strategies], 1)


def _paid(owner: str, user: str, conventions: Conventions = GALVATRON) -> tuple[float, int, int]:
    """(seconds, saved, transient bytes) of the head, in micro-batches of 4 samples."""
    costs = _costs(owner, user, conventions=conventions)
    paid = costs.resplit_in(np.array([0, 1]), np.array([0, 1]), 4, first=True)
    assert (paid.time_ns[0], paid.activation_bytes[0], paid.transient_bytes[0]) == (0, 0, 0), "the owner pays nothing"
    return paid.time_ns[1] / 1e9, int(paid.activation_bytes[1]), int(paid.transient_bytes[1])


@pytest.mark.parametrize(("owner", "user"), [("dp4", "sdp4+rc"), ("tp4", "tp4+rc"), ("dp2-tp2", "sdp2-tp2")])
def test_alike_is_free(owner: str, user: str) -> None:
    assert _paid(owner, user) == (0.0, 0, 0)


def test_the_papers_systems_split_alike() -> None:
    assert _paid("tp4", "dp4", PAPER_SYSTEMS) == (0.0, 0, 0)


def test_parts_are_gathered_and_the_gradient_is_scattered() -> None:
    """Over four neighbours: two steps of latency, three quarters of the weight, there and back. Under DP the layer
    works on one sample, 60 MB; the whole gradient, padded, and a quarter of it are 270 MB."""
    seconds, saved, transient = _paid("tp4", "dp4")
    assert seconds == pytest.approx(2 * (3 / 4 * 0.120 + 2e-4))
    assert (saved, transient) == (WHOLE, 270 * MB - 60 * MB)


def test_recompute_gathers_twice_and_saves_nothing() -> None:
    seconds, saved, transient = _paid("tp4", "dp4+rc")
    assert seconds == pytest.approx(3 * (3 / 4 * 0.120 + 2e-4))
    assert (saved, transient) == (0, WHOLE + 270 * MB - 60 * MB)


def test_a_whole_weight_is_only_sliced() -> None:
    """But its gradient is written into a whole one, beside the user's quarter: 150 MB, of which 60 are counted."""
    assert _paid("dp4", "tp4") == (0.0, 0, 120 * MB + 30 * MB - 60 * MB)


def test_other_ranks_of_the_same_degree_differ() -> None:
    seconds, saved, _ = _paid("tp2-dp2", "dp2-tp2")
    assert seconds == pytest.approx(2 * (1 / 2 * 0.120 + 1e-4))
    assert saved == WHOLE


def _plan(*strategies: str, micro_batches: int) -> Plan:
    request = Request(model=MODEL, cluster=CLUSTER, batch=16)
    return priced(request, [strategies], micro_batches=micro_batches)


def test_a_plan_by_hand_pays() -> None:
    """Each of its micro-batches does, but one at a time holds the weight."""
    apart, alike = _plan("tp4", "dp4", micro_batches=4), _plan("dp4", "dp4", micro_batches=4)
    (use,), (other,) = apart.stages, alike.stages
    assert use.time.tp_s == pytest.approx(2 * (3 / 4 * 0.120 + 2e-4))
    assert use.time_s - use.time.layout_s > use.time.tp_s > other.time.tp_s == 0
    assert use.memory.transient - other.memory.transient == 210 * MB
    split = sum(kind.split_activation_bytes for kind in (EMBEDDING, HEAD))
    assert use.memory.activations == WHOLE + split
