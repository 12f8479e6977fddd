"""What a rank keeps: sharded layers just their shards between passes, and nobody anything twice.

In multiples of the model's parameters in fp32. Layers are recomputed and batches small, so activations add little.
"""

from __future__ import annotations

import pytest
import torch
from keeping import kept_by_forward, watch
from longer import longer
from oracle import Case, batches, first_weights
from parity import plan_for
from ranks import ranks
from small_models import config

_ACTIVATIONS = 0.05
"""Of a batch, at most, in the same unit."""
_CONFIG = config("llama", vocab_size=64, hidden_size=64, intermediate_size=256)
_HEAD = 0.05
"""Of the model: under SDP the head stays gathered from its forward to its backward, which is next."""


def _watched(stages: list[list[str]], dtype: torch.dtype) -> list[dict[str, list[float]]]:
    """Two iterations of three micro-batches."""
    case = Case(config=_CONFIG, stages=stages, batch=12, micro_batches=3, dtype=dtype, steps=2)
    found: list[dict[str, list[float]]] = ranks(4).run(watch, case, plan_for(case), first_weights(case), batches(case))
    return found


def _between(values: list[float]) -> list[float]:
    """Of each iteration, those after a first micro-batch has left gradients."""
    return [value for place, value in enumerate(values) if place % 3]


@pytest.mark.parametrize(
    ("strategy", "between", "forward_done", "end"),
    [
        # In fp32: a shard of parameters and one of gradients, whether forward or backward was last.
        ("sdp4+rc", 0.25 + 0.25, 0.25 + 0.25, 0.25 + 0.25),
        longer("dp2-sdp2+rc", 0.5 + 0.5, 0.5 + 0.5, 0.5 + 0.5),
        longer("sdp2-tp2+rc", 0.25 + 0.25, 0.25 + 0.25, 0.25 + 0.25),
        # Parameters and gradients, no second copy of either.
        longer("dp4+rc", 1 + 1, 1 + 1, 1 + 1),
        longer("dp2-tp2+rc", 0.5 + 0.5, 0.5 + 0.5, 0.5 + 0.5),
        # Whole parameters from the first forward to the last backward beside the shard that the optimizer updates.
        longer("dp4+zero2+rc", 1 + 0.25 + 0.25, 1 + 0.25 + 0.25, 0.25 + 0.25),
    ],
)
def test_parameters_and_gradients_in_fp32(strategy: str, between: float, forward_done: float, end: float) -> None:
    head = _HEAD if "sdp" in strategy else 0.0
    for seen in _watched([[strategy] * 4], torch.float32):
        assert _between(seen["forward"]) == pytest.approx([between] * 4, abs=_ACTIVATIONS)
        assert _between(seen["backward"]) == pytest.approx([forward_done + head] * 4, abs=_ACTIVATIONS)
        assert seen["end"] == pytest.approx([end] * 2, abs=_ACTIVATIONS)


@pytest.mark.parametrize(
    ("strategy", "between", "end"),
    [
        # fp32 masters and gradients are sharded; a bf16 copy is gathered and let go.
        longer("sdp4+rc", 0.25 + 0.25, 0.25 + 0.25),
        # Masters and gradients in fp32, a working copy in bf16.
        longer("dp4+rc", 1 + 1 + 0.5, 1 + 1 + 0.5),
        # The working copy is whole until the iteration ends.
        ("dp4+zero2+rc", 0.25 + 0.25 + 0.5, 0.25 + 0.25),
    ],
)
def test_parameters_and_gradients_in_bf16(strategy: str, between: float, end: float) -> None:
    for seen in _watched([[strategy] * 4], torch.bfloat16):
        assert _between(seen["forward"]) == pytest.approx([between] * 4, abs=_ACTIVATIONS)
        assert _between(seen["backward"]) == pytest.approx([between] * 4, abs=_ACTIVATIONS)
        assert seen["end"] == pytest.approx([end] * 2, abs=_ACTIVATIONS)


@pytest.mark.slow
def test_sharded_stages_of_a_pipeline() -> None:
    """Where stock pipelines keep whole parameters and gradients from the first micro-batch to the last."""
    for seen in _watched([["sdp2+rc", "sdp2+rc"], ["sdp2+rc", "sdp2+rc"]], torch.float32):
        held = seen["end"][0] / 2
        assert held == pytest.approx(0.25, abs=0.05)
        for value in [*_between(seen["forward"]), *_between(seen["backward"])]:
            assert value <= 2 * held + 2 * _ACTIVATIONS


@pytest.mark.parametrize(
    ("strategy", "samples", "parts"),
    [longer("dp4", 1, 1), longer("tp4", 4, 1), longer("tp4+sp", 4, 4), ("dp2-tp2+sp", 2, 2)],
)
def test_recompute_keeps_a_layers_input_and_no_more(strategy: str, samples: int, parts: int) -> None:
    """With sequence parallelism too, whose projections would keep parts of their inputs."""
    stages = [[strategy.removesuffix("+sp"), *[f"{strategy}+rc"] * 3]]
    case = Case(config=_CONFIG, stages=stages, batch=4, dtype=torch.float32, steps=1)
    boundary = 8 * 64 * 4  # tokens, features, bytes
    for kept in ranks(4).run(kept_by_forward, case, plan_for(case), first_weights(case), batches(case)[0]):
        assert kept / boundary == pytest.approx(3 * samples / parts, abs=0.75)
