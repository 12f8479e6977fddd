"""Figures that nothing real has are refused by name, from Python; the search certifies nothing beyond its range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import load_cluster
from galvatron.core.spec import LayerMemory, LayerSpec, LayerTime, ModelSpec, Strategy, TensorParallel, Training
from galvatron.core.spec.figures import MOST_LAYERS
from galvatron.core.spec.tuning import Lora
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.render import plan_view

LAYER = LayerSpec(
    name="block", parameters=10**6, forward_flops=10**9, split_activation_bytes=2**20, boundary_bytes=2**16
)
TITANS = load_cluster("titan-rtx-8")
_ANY: Any = LAYER
_LEVEL: Any = TITANS.levels[0]
_TITANS: Any = TITANS
_TRAINING: Any = Training
_STRATEGY: Any = Strategy
"""For values of the wrong type."""


def _model(layer: LayerSpec, count: int = 4) -> ModelSpec:
    return ModelSpec(name="m", family="custom", layers=(layer,) * count, training=Training())


_MODEL: Any = _model(LAYER)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(LAYER, boundary_bytes=10**18), "layer 'block': boundary_bytes is 1000000000000000000"),
        (lambda: replace(LAYER, parameters=-1), "parameters is -1; expected a whole number from 0"),
        (lambda: replace(LAYER, forward_flops=10**400), "forward_flops is an integer of more than 63 bits"),
        (lambda: replace(_ANY, split_activation_bytes=float("nan")), "split_activation_bytes is nan"),
        (lambda: replace(_ANY, transient_bytes="8GB"), "transient_bytes is '8GB'; expected a whole number"),
        (lambda: replace(LAYER, tied_parameters=10**7), "tied_parameters is 10000000; expected at most its parameters"),
        (lambda: _model(LAYER, MOST_LAYERS + 1), "it has 2049 layers; expected at most 2048"),
        (lambda: Training(sequence_length=10**12), "sequence_length is 1000000000000; expected a whole number from 1"),
        (
            lambda: TensorParallel(forward_collectives=2, backward_collectives=2, message_bytes=-5),
            "message_bytes is -5",
        ),
        (
            lambda: TensorParallel(divides=(0,), forward_collectives=2, backward_collectives=2, message_bytes=5),
            "divides holds 0",
        ),
        (lambda: Lora(rank=10**20, alpha=1.0), "lora: rank is an integer of more than 63 bits"),
        (lambda: replace(TITANS.levels[0], bytes_per_s=-1e9), "bytes_per_s is -1e\\+09; expected a number from 1"),
        (lambda: replace(TITANS.levels[0], units=0), "units is 0"),
        (lambda: replace(TITANS.device, memory_bytes=2**60), "memory_bytes is 1152921504606846976; expected"),
        (lambda: replace(TITANS.device, fp32_flops_per_s=0.0), "fp32_flops_per_s is 0"),
        (lambda: replace(TITANS, fragmentation=1.0), "fragmentation is 1"),
        (lambda: replace(_LEVEL, units=None), "units is None; expected a whole number"),
        (lambda: replace(_LEVEL, shared=None), "shared is None; expected True or False"),
        (lambda: replace(_TITANS, name=5), "cluster 5: name is 5; expected text"),
        (lambda: replace(_TITANS, device="h100"), "device is 'h100'; expected a Device"),
        (lambda: replace(_TITANS, levels=(5,)), r"levels is \(5,\); expected a tuple, of a Level each"),
        (lambda: _TRAINING(precision="bf16"), "precision is 'bf16'; expected Precision.FP32 or .* or Precision.BF16"),
        (lambda: replace(_MODEL, layers=[1]), r"layers is \[1\]; expected a tuple, of a LayerSpec each"),
        (lambda: _STRATEGY(5), "5 given as axes; expected a tuple of Axis, or Strategy.parse"),
        (
            lambda: replace(TITANS, levels=(replace(TITANS.levels[0], units=2**20),) * 2),
            "its levels join 1099511627776 devices",
        ),
        (lambda: LayerTime(layer="block", forward_s=-1.0), "times of 'block': forward_s is -1"),
        (lambda: LayerTime(layer="block", forward_s=1.0, backward_ratio=-2.0), "backward_ratio is -2"),
        (lambda: LayerMemory(layer="block", activation_bytes=2**60, transient_bytes=0), "activation_bytes is"),
    ],
)
def test_a_fact_that_cannot_be_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flops", [2**57, 2**60])
def test_layers_that_take_hours_are_refused_rather_than_called_too_large(flops: int) -> None:
    request = Request(model=_model(replace(LAYER, forward_flops=flops), 2), cluster=TITANS, batch=8)
    with pytest.raises(InvalidInput, match="every plan takes over 17592 s for a micro-batch in a stage"):
        make_plan(request)


def test_nothing_is_proven_about_plans_beyond_the_range() -> None:
    """Micro-batches of two samples take 1.4 hours a layer and can be told apart, those of 256 cannot."""
    slow = replace(LAYER, forward_flops=3 * 10**16, split_activation_bytes=1000, boundary_bytes=100)
    plan = make_plan(Request(model=_model(slow), cluster=TITANS))
    assert plan.certificate is not None
    assert plan.certificate.gap > 0
    assert plan.certificate.lower_bound_s < plan.iteration_s
    assert "not proven optimal: it may be far from the best plan" in _text(plan)


def test_the_largest_figures_that_are_allowed_stay_in_range(tmp_path: Path) -> None:
    """Everything at its largest gives a plan with positive figures that reads back, or one line of refusal."""
    big = replace(LAYER, split_activation_bytes=2**50, boundary_bytes=2**50, transient_bytes=2**50)
    many = replace(LAYER, parameters=2**50)
    for layer in (big, many, replace(big, parameters=2**50, forward_flops=2**60)):
        for batch in (8, 2**22):
            with pytest.raises(InvalidInput, match="beyond what is planned"):
                make_plan(Request(model=_model(layer, 3), cluster=TITANS, batch=batch))
    empty = replace(LAYER, parameters=0, forward_flops=0, split_activation_bytes=0, boundary_bytes=0)
    plan = make_plan(Request(model=_model(empty, 3), cluster=TITANS, batch=2**22))
    assert plan.iteration_s > 0
    plan.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json") == plan


def _text(plan: Plan) -> str:
    shown = StringIO()
    Console(width=200, file=shown).print(plan_view(plan))
    return shown.getvalue()


def test_whole_numbers_are_figures_too(tmp_path: Path) -> None:
    """A plan for a cluster from Python is read back as it was."""
    level = replace(TITANS.levels[0], bytes_per_s=300 * 10**9, latency_s=0)
    cluster = replace(TITANS, levels=(level, *TITANS.levels[1:]), overlap_slowdown=1)
    make_plan(Request(model=_model(LAYER), cluster=cluster, batch=8)).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cluster.facts == cluster
