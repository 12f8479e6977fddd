"""Seeded random plans: any mix of kinds, orders, flags, cuts, schedules and micro-batches trains as one process."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from longer import longer
from oracle import Case
from parity import check, spec_of
from small_models import IMAGES, LAYERS, config

from galvatron.core.spec import DENSE_KINDS, Kind, LayerSpec, Strategy, factor_by_factor
from galvatron.planner.space import EXTENDED, Space

_SEEDS = range(1, 21)
_SHORT = (8, 11, 12)
"""Of these ``make test`` runs three, on four and on eight devices; the longer run has all."""
_SPACE = Space(name="full", title="", switches=EXTENDED)


def _case(seed: int) -> Case:
    draw = random.Random(seed)
    family = list(LAYERS)[seed % 6]
    devices = 4 if seed % 8 in (0, 3, 5) or family == "swin" else 8
    degree = (2, 1, 4)[seed // 2 % 3] if devices == 8 else (1, 2)[seed % 2]
    micro_batches = draw.choice([1, 2, 4] if degree < 4 else [2, 4])
    tied = {"tie_word_embeddings": True} if family == "llama" and draw.random() < 0.5 else {}
    settings = config(family, **tied)
    batch = 16 if family in IMAGES else draw.choice([16, 32])
    layers = spec_of(Case(config=settings, stages=[])).layers
    cuts = sorted(draw.sample(range(1, len(layers)), degree - 1))
    chosen = [_strategy(draw, layer, devices // degree, batch // micro_batches) for layer in layers]
    return Case(
        config=settings,
        stages=[chosen[first:last] for first, last in zip([0, *cuts], [*cuts, len(layers)], strict=True)],
        batch=batch,
        micro_batches=micro_batches,
        schedule=draw.choice(["gpipe", "1f1b"]),
        clip=draw.choice([None, 0.5]),
        padding=family not in IMAGES and draw.random() < 0.5,
        seed=seed,
        steps=2,
    )


def _strategy(draw: random.Random, layer: LayerSpec, devices: int, rows: int) -> str:
    """One that can run the layer; all trees of axes are equally likely, whatever flags they may have."""
    fitting: dict[str, list[Strategy]] = {}
    for strategy in _SPACE.strategies(devices):
        degree = strategy.degree(Kind.TP)
        if (
            rows % strategy.data_degree == 0
            and layer.allows_tensor_parallel(degree)
            and (not strategy.sequence_parallel or layer.allows_sequence_parallel(degree))
            and (not strategy.fused_loss or layer.fused_loss is not None)
            and layer.allows_grade(strategy)
            and not strategy.offload  # nothing of these sizes is worth it
        ):
            fitting.setdefault(str(Strategy(strategy.axes)), []).append(strategy)
    return str(draw.choice(fitting[draw.choice(list(fitting))]))


@pytest.mark.parametrize("seed", [seed if seed in _SHORT else longer(seed) for seed in _SEEDS])
def test_a_random_plan(seed: int) -> None:
    check(_case(seed))


def test_the_plans_have_everything() -> None:
    """Otherwise the seeds would promise more than they try."""
    cases = [_case(seed) for seed in _SEEDS]
    strategies = [Strategy.parse(text) for case in cases for stage in case.stages for text in stage]
    kinds = {tuple(axis.kind for axis in strategy.axes) for strategy in strategies}
    for kind in DENSE_KINDS:
        assert (kind,) in kinds
        assert {(kind, other) for other in DENSE_KINDS if other is not kind} <= kinds, "pairs in both orders"
    assert any(len(axes) == 3 for axes in kinds)
    assert any(strategy.zero2 for strategy in strategies)
    assert any(strategy.fused_loss for strategy in strategies)
    assert any(strategy.sequence_parallel and strategy.recompute for strategy in strategies)
    assert any(strategy.selective_recompute for strategy in strategies)
    assert any(strategy.recompute_but_attention for strategy in strategies)
    pipelines = {(len(case.stages), case.schedule) for case in cases if len(case.stages) > 1}
    assert pipelines == {(2, "gpipe"), (2, "1f1b"), (4, "gpipe"), (4, "1f1b")}
    assert any(len({len(stage) for stage in case.stages}) > 1 for case in cases), "uneven cuts"
    assert {case.micro_batches for case in cases} == {1, 2, 4}
    assert {case.config["model_type"] for case in cases} == set(LAYERS)
    few = [
        not factor_by_factor(
            Strategy.parse(first).batch_factors, Strategy.parse(second).batch_factors, case.batch // case.micro_batches
        )
        for case in cases
        for stage in case.stages
        for first, second in pairwise(stage)
    ]
    assert {True, False} == set(few)
