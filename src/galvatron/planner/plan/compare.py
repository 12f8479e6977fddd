"""All spaces side by side over several budgets, as in the paper's main table (Section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.advice import feasible_batch
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.space import SPACES

__all__ = ["Cell", "Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One space at one budget: a plan, or why there is none."""

    space: str
    memory_bytes: int
    plan: Plan | None
    why_not: str = "out of memory"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row a space, a column a budget."""

    request: Request
    budgets: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]


def compare(request: Request, budgets: Sequence[int]) -> Comparison:
    """Plan the model in each space under each budget."""
    rows = tuple(tuple(_cell(request, space.name, budget) for budget in budgets) for space in SPACES)
    return Comparison(request, tuple(budgets), rows)


def _cell(request: Request, space: str, budget: int) -> Cell:
    try:
        asked = replace(request, space=space, memory_bytes=budget)
        plan = try_plan(asked)
        if plan is None and feasible_batch(asked) is None:
            return Cell(space, budget, None, "not possible")
        return Cell(space, budget, plan)
    except InvalidInput:
        return Cell(space, budget, None, "not possible")
