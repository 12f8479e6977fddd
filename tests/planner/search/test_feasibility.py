"""The smallest budget, against brute force over everything: in it a plan fits, in a byte less none does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from longer import longer
from search_oracles import brute_search, random_expert_problem, random_problem, rule_cuts

from galvatron.planner.search import CutRule, Feasibility, Problem, least_budget, peaks, search


def _problems(trials: int) -> list[Problem]:
    found = []
    for trial in range(trials):
        rng = np.random.default_rng((41, trial))
        make = random_expert_problem if trial % 2 else random_problem
        cuts = CutRule.LAYERS if trial % 5 == 0 else CutRule.EXACT
        found.append(replace(make(rng, most_work=400), cuts=cuts))
    return found


def _wrong(problem: Problem) -> bool:
    least = least_budget(problem)
    if least is None:
        return search(replace(problem, budget=1 << 43)) is not None
    if search(replace(problem, budget=least)) is None:
        return True
    cuts = None if problem.cuts is CutRule.EXACT else partial(rule_cuts, problem, problem.cuts)
    return brute_search(replace(problem, budget=least - 1), cuts) is not None


@pytest.mark.parametrize("trials", [12, longer(120)])
def test_the_least_budget_is_the_least(trials: int) -> None:
    assert not [trial for trial, problem in enumerate(_problems(trials)) if _wrong(problem)]


def test_brute_force_notices_transients_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    monkeypatch.setattr(
        peaks, "useful_thetas", lambda steps: np.unique(np.concatenate([each.thetas[:1] for each in steps]))
    )
    assert any(_wrong(problem) for problem in _problems(24))


def test_a_budget_fits_from_the_least_on() -> None:
    """The question whether something fits stops at the first plan; its answer is the same."""
    asked = 0
    for problem in _problems(16):
        for batch in problem.batches:
            least = least_budget(replace(problem, batches=(batch,)))
            assert Feasibility(problem).can_divide(batch) == (least is not None)
            if least is not None:
                assert Feasibility(replace(problem, budget=least)).fits(batch)
                assert not Feasibility(replace(problem, budget=least - 1)).fits(batch)
                asked += 1
    assert asked >= 16
