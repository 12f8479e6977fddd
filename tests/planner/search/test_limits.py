"""Limits on a space (--pin, --forbid, --pipeline, --max-micro-batch): what is left of it is searched exactly.

The oracle enumerates the whole space and drops what the limits rule out by rules of its own: it writes down every group
of devices and looks whether it leaves its island.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import search_oracles
from longer import longer
from search_oracles import brute_search, limited, random_problem

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Kind, Strategy
from galvatron.planner.cost import NEVER
from galvatron.planner.plan.explain import explain, request_of
from galvatron.planner.plan.planner import try_plan
from galvatron.planner.search import Problem, search


@dataclass(frozen=True)
class _Asked:
    """Limits as an oracle sees them."""

    kind: Kind | None
    island: int
    """Of devices, which groups of the kind must not leave."""
    degree: int | None
    pin: tuple[str, str] | None
    most: int | None

    def permits(self, layer: str, strategy: Strategy, degree: int) -> bool:
        if self.degree not in (None, degree):
            return False
        if self.pin is not None and self.pin[0] == layer and str(strategy) != self.pin[1]:
            return False
        return self.kind is None or all(
            len({rank // self.island for rank in group}) == 1 for group in _groups(strategy, self.kind)
        )


def _groups(strategy: Strategy, kind: Kind) -> list[list[int]]:
    """Ranks that differ only in their place on the axes of this kind, axes outermost first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(strategy.devices):
        places, left = [], rank
        for axis in reversed(strategy.axes):
            places.append((axis.kind, left % axis.degree))
            left //= axis.degree
        groups.setdefault(tuple(place for own, place in places if own != kind), []).append(rank)
    return list(groups.values())


class _Filtered:
    """Prices in which what is not permitted is impossible."""

    def __init__(self, costs: Any, names: list[str], asked: _Asked, degree: int) -> None:
        self.strategies = costs.strategies
        self._costs = costs
        self._never = np.array([[not asked.permits(name, s, degree) for s in costs.strategies] for name in names])

    def tables(self, micro_batch: Any, micro_batches: Any) -> Any:
        tables = self._costs.tables(micro_batch, micro_batches)
        return replace(tables, time_ns=np.where(self._never, NEVER, tables.time_ns))


def _brute(problem: Problem, asked: _Asked, monkeypatch: pytest.MonkeyPatch) -> Fraction:
    names = [kind.name for kind in problem.cost.model.kinds]
    costs, counts = search_oracles.stage_costs, search_oracles.micro_batch_counts

    def few(problem: Problem, batch: int, degree: int) -> list[int]:
        return [count for count in counts(problem, batch, degree) if asked.most is None or batch // count <= asked.most]

    with monkeypatch.context() as patch:
        patch.setattr(search_oracles, "stage_costs", lambda p, d: _Filtered(costs(p, d), names, asked, d))
        patch.setattr(search_oracles, "micro_batch_counts", few)
        found = brute_search(problem)
    return Fraction(found.batch, found.iteration_ns) if found else Fraction(0)


def _asked(rng: np.random.Generator, problem: Problem) -> _Asked:
    devices, model = problem.cost.cluster.devices, problem.cost.model
    degrees = problem.space.pipeline_degrees(devices)
    degree = int(rng.choice(degrees))
    strategies = problem.space.strategies(devices // degree)
    kind = model.kinds[int(rng.integers(len(model.kinds)))]
    able = [each for each in strategies if model.allows(kind, each)]
    return _Asked(
        kind=Kind(rng.choice(["dp", "sdp", "tp"])) if rng.random() < 0.5 else None,
        island=int(rng.choice([1, 2, 2, 4])),
        degree=degree if rng.random() < 0.3 else None,
        pin=(kind.name, str(able[int(rng.integers(len(able)))])) if able and rng.random() < 0.5 else None,
        most=int(rng.choice([1, 2, 4])) if rng.random() < 0.3 else None,
    )


def _within(problem: Problem, asked: _Asked) -> Problem:
    """The problem that the planner would make of these limits."""
    confined = () if asked.kind is None else ((asked.kind, asked.island),)
    space = replace(problem.space, confined=confined, degree=asked.degree, limits="limits")
    pins = () if asked.pin is None else ((asked.pin[0], Strategy.parse(asked.pin[1])),)
    return replace(problem, space=space, cost=replace(problem.cost, pins=pins), max_micro_batch=asked.most)


def _found(problem: Problem) -> Fraction:
    try:
        optimum = search(problem)
    except InvalidInput:  # nothing is left of the space
        return Fraction(0)
    return Fraction(optimum.batch, optimum.solved.iteration_ns) if optimum else Fraction(0)


@pytest.mark.parametrize("trials", [12, longer(300)])
def test_equals_brute_force_within_limits(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    feasible = binding = 0
    for trial in range(trials):
        rng = np.random.default_rng((41, trial))
        problem = limited(rng, random_problem(rng, most_work=1000))
        asked = _asked(rng, problem)
        expected = _brute(problem, asked, monkeypatch)
        assert _found(_within(problem, asked)) == expected, (trial, asked)
        feasible += expected > 0
        binding += 0 < expected < _found(problem)
    assert feasible >= trials // 4, "the instances test too little: most have no solution"
    assert binding >= trials // 10, "the instances test too little: limits seldom decide"


def _spans(strategy: Strategy, kind: Kind, island: int) -> bool:
    return any(len({rank // island for rank in group}) > 1 for group in _groups(strategy, kind))


@pytest.mark.parametrize("trials", [20, longer(400)])
def test_what_the_optimum_uses_can_be_forbidden(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances in which forbidding matters: of a kind of parallelism that the best plan uses across islands."""
    changed = 0
    for trial in range(trials):
        rng = np.random.default_rng((43, trial))
        problem = limited(rng, random_problem(rng, most_work=400))
        optimum = search(problem)
        if optimum is None:
            continue
        island = int(rng.choice([1, 2]))
        used = [strategy for stage in optimum.strategies for strategy in stage]
        kinds = [kind for kind in (Kind.DP, Kind.SDP, Kind.TP) if any(_spans(own, kind, island) for own in used)]
        if not kinds:
            continue
        asked = _Asked(kind=kinds[int(rng.integers(len(kinds)))], island=island, degree=None, pin=None, most=None)
        expected = _brute(problem, asked, monkeypatch)
        assert _found(_within(problem, asked)) == expected, (trial, asked)
        changed += expected < _found(problem)
    assert changed >= trials // 5, "the instances test too little: forbidding seldom decides"


def test_what_is_asked_for_is_kept_and_remembered() -> None:
    plan = galvatron.plan(
        "bert-tiny", "titan-rtx-8", batch=32, pin="encoder=tp2-dp2", forbid="sdp:pair", pipeline=2, max_micro_batch=8
    )
    layers = [layer for stage in plan.stages for layer in stage.layers]
    assert {layer.strategy for layer in layers if layer.layer == "encoder"} == {"tp2-dp2"}
    assert len(plan.stages) == 2
    assert plan.micro_batch <= 8
    again = try_plan(request_of(plan))
    assert again is not None
    assert again.to_json() == plan.to_json()
    assert "pinned" in explain(plan).reasons


def test_a_file_that_breaks_its_own_limits_is_refused(tmp_path: Any) -> None:
    plan = galvatron.plan("bert-tiny", "titan-rtx-8", batch=32, pin="encoder=dp8")
    plan.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    content["space"]["limits"]["pins"][0]["strategy"] = "sdp8"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=r"space\.limits\.pins"):
        galvatron.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"pin": "decoder=dp8"}, "no layer 'decoder'"),
        ({"pin": "encoder"}, "expected a kind of layer and its strategy"),
        ({"pin": "encoder=tp3"}, "no strategy of space 'full'"),
        ({"pin": "encoder=dp8,encoder=tp8"}, "two strategies"),
        ({"pin": "encoder=dp8/ep8"}, "cannot be pinned"),
        ({"forbid": "tp:rack"}, "no level 'rack'; its levels are pair, quad, node"),
        ({"forbid": "zz"}, "expected one of dp, sdp, tp, ep"),
        ({"pipeline": 3}, "--pipeline 3: nothing is left"),
        ({"max_micro_batch": 0}, "at least 1"),
        ({"space": "dp", "forbid": "dp"}, "nothing is left of space 'dp'"),
    ],
)
def test_limits_that_leave_nothing_are_refused_by_name(said: dict[str, Any], words: str) -> None:
    plan: Callable[..., galvatron.Plan] = galvatron.plan
    with pytest.raises(InvalidInput, match=words):
        plan("bert-tiny", "titan-rtx-8", batch=32, **said)
