"""Bounds in whole strategies, against enumeration: what they leave out may never be needed.

What would break: a sum that was left out though it fits the cutoff, a front that is too slow where points were merged,
a layer counted twice among those put off.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from longer import longer
from search_oracles import binding_budget, enumerate_stage, evaluate, random_stage

from galvatron.planner.cost import NEVER
from galvatron.planner.search import completions, peaks, solve_stage
from galvatron.planner.search import stage as stage_module
from galvatron.planner.search.candidates import Lean
from galvatron.planner.search.choices import Useful
from galvatron.planner.search.completions import Completions
from galvatron.planner.search.labels import Labels
from galvatron.planner.search.peaks import Sums
from galvatron.planner.search.stage import solve_any

Rng = np.random.Generator


def _table(rng: Rng) -> Useful:
    size = int(rng.integers(1, 4))
    time, memory = rng.integers(1, 40, size), rng.integers(0, 12, size)
    return Useful(np.arange(size), time, memory, np.zeros(size, dtype=np.int64))


def _least(tables: list[Useful], room: int) -> int:
    """By enumeration: least time of one choice for each of these layers."""
    best = NEVER
    for choice in product(*(range(len(table.time)) for table in tables)):
        memory = sum(int(table.memory[at]) for table, at in zip(tables, choice, strict=True))
        time = sum(int(table.time[at]) for table, at in zip(tables, choice, strict=True))
        best = min(best, time) if memory <= room else best
    return best


def _wrong_bounds(rng: Rng, *, cutoffs: bool) -> int:
    """Of labels of one random stage: how many bounds are above the true least time of what is lacking, though the whole
    would stay below the cutoff; without cutoffs also how many are below it."""
    kinds = {0: _table(rng), 1: _table(rng)}
    sequence = rng.integers(0, 2, int(rng.integers(1, 6))).tolist()
    deferred = int(rng.integers(0, 2)) if rng.random() < 0.7 else None
    budget, lam = int(rng.integers(0, 40)), float(rng.choice([0.0, 0.7, 3.0]))
    cutoff = int(rng.integers(10, 150)) if cutoffs else NEVER
    bounds = Completions(kinds, sequence, deferred, lam, budget).below(cutoff)
    layer = int(rng.integers(0, len(sequence)))
    late = [at for at in range(layer + 1) if sequence[at] == deferred and rng.random() < 0.5]
    taken = [(kinds[sequence[at]], rng.integers(0, len(kinds[sequence[at]].time))) for at in range(layer + 1)]
    own = [(int(table.time[at]), int(table.memory[at])) for i, (table, at) in enumerate(taken) if i not in late]
    time, memory = (sum(each) for each in zip((0, 0), *own, strict=True))
    label = Labels(np.array([time]), np.array([memory]), np.array([0]), np.array([len(late)]))
    lacking = [kinds[kind] for kind in [*(sequence[at] for at in late), *sequence[layer + 1 :]]]
    true, bound = _least(lacking, budget - memory), int(bounds.least_time(layer, label)[0])
    if not cutoffs:
        return int(true != bound)
    return int(true < NEVER and time + true < cutoff and bound > true)


@pytest.mark.parametrize("trials", [300, longer(3000)])
def test_fronts_equal_enumeration(trials: int) -> None:
    assert sum(_wrong_bounds(np.random.default_rng((40, trial)), cutoffs=False) for trial in range(trials)) == 0


@pytest.mark.parametrize("most", [1024, 3])
def test_what_is_left_out_cannot_beat_the_cutoff(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few points a front may have."""
    monkeypatch.setattr(completions, "_MOST", most)
    assert sum(_wrong_bounds(np.random.default_rng((41, trial)), cutoffs=True) for trial in range(300)) == 0


def test_enumeration_notices_sums_that_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    monkeypatch.setattr(completions, "_ROUNDING", -6.0)
    assert sum(_wrong_bounds(np.random.default_rng((41, trial)), cutoffs=True) for trial in range(300)) > 0


def _always_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small stages are treated as if they were deep and had many labels, and no beam finds their optimum first."""
    monkeypatch.setattr(stage_module, "_MANY_LABELS", 0)
    monkeypatch.setattr(stage_module, "_MANY", 2)
    monkeypatch.setattr(stage_module, "_BEAMS", (1,))


def _wrong_stages(trials: int) -> int:
    wrong = 0
    for trial in range(trials):
        rng = np.random.default_rng((42, trial))
        problem = random_stage(rng, layers=int(rng.integers(2, 7)), strategies=int(rng.integers(2, 6)))
        budget = binding_budget(rng, problem)
        solution = solve_stage(problem, budget)
        wrong += (solution.time if solution else None) != enumerate_stage(problem, budget)
        if solution is not None:
            time, peak = evaluate(problem, solution.choice)
            wrong += time != solution.time or peak > budget
    return wrong


@pytest.mark.parametrize("trials", [120, longer(1500)])
def test_stages_that_need_the_bounds_equal_brute_force(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _always_looked_at(monkeypatch)
    assert _wrong_stages(trials) == 0


def test_brute_force_notices_a_bound_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    _always_looked_at(monkeypatch)
    right = Completions.least_time
    monkeypatch.setattr(Completions, "least_time", lambda self, layer, labels: right(self, layer, labels) + 6)
    assert _wrong_stages(120) > 0


def test_the_best_of_several_problems_is_found() -> None:
    """Searched together, with one cutoff for all."""
    for trial in range(40):
        rng = np.random.default_rng((43, trial))
        layers = int(rng.integers(1, 5))
        problems = [random_stage(rng, layers, strategies=4) for _ in range(3)]
        budget = binding_budget(rng, problems[0])
        each = [enumerate_stage(problem, budget) for problem in problems]
        expected = min((time for time in each if time is not None), default=None)
        found = solve_any(problems, budget)
        assert (found.time if found else None) == expected
        if expected is not None:
            assert solve_any(problems, budget, expected) is None


def _wrong_peaks(trials: int) -> int:
    wrong = 0
    for trial in range(trials):
        rng = np.random.default_rng((44, trial))
        sizes = [int(rng.integers(1, 4)) for _ in range(2)]
        leans = [
            Lean(
                np.arange(size), *(rng.integers(0, top, size) for top in (20, 5, 30))
            )  # states, activations, transient
            for size in sizes
        ]
        kinds, held = rng.integers(0, 2, 4), int(rng.integers(1, 4))
        sums = Sums.of(leans, held, kinds)
        for begin, end in ((0, 1), (0, 4), (1, 3), (2, 4)):
            peaks_of = []
            for choice in product(*(range(sizes[kind]) for kind in kinds[begin:end])):
                chosen = [(leans[kind], at) for kind, at in zip(kinds[begin:end], choice, strict=True)]
                memory = sum(lean.state_bytes[at] + held * lean.activation_bytes[at] for lean, at in chosen)
                peaks_of.append(memory + max(lean.transient_bytes[at] for lean, at in chosen))
            wrong += int(sums.peaks(np.array([begin]), np.array([end]))[0]) != min(peaks_of)
    return wrong


def test_least_peaks_equal_enumeration() -> None:
    assert _wrong_peaks(60) == 0


def test_enumeration_notices_transients_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    monkeypatch.setattr(peaks, "useful_thetas", lambda steps: np.array([max(each.thetas[0] for each in steps)]))
    assert _wrong_peaks(60) > 0
