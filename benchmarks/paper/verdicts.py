"""What the runs of the main table show, and what they must show: pure functions from runs to findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cells import Run, deciding
from systems import SYSTEMS

__all__ = ["BrokenPromises", "Column", "broken_promises", "columns"]

OURS = "galvatron"
_EXTENDED = "galvatron-extended"
_BESIDE = (OURS, _EXTENDED)
"""No baselines."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """All systems of one model at one budget."""

    model: str
    budget: str
    runs: tuple[Run, ...]
    """The run of each system that counts."""

    def of(self, system: str) -> Run | None:
        return next((run for run in self.runs if run.system == system), None)

    @property
    def boots(self) -> int:
        """Boots of the machine in which it was run: speeds differ between them."""
        return len({run.facts.get("boot") for run in self.runs})

    @property
    def open_systems(self) -> int:
        """How many baselines have not been run."""
        known = {run.system for run in self.runs}
        return sum(system.name not in {*known, *_BESIDE} for system in SYSTEMS)

    @property
    def best_baseline(self) -> Run | None:
        done = [run for run in self.runs if run.status == "ok" and run.system not in _BESIDE]
        return max(done, key=lambda run: run.samples_per_s, default=None)

    @property
    def lead(self) -> float | None:
        """Our plan's throughput over the best baseline's; None where either did not run."""
        return self._over_best(OURS)

    @property
    def extended_lead(self) -> float | None:
        """The same of the plan with all that the planner has."""
        return self._over_best(_EXTENDED)

    def _over_best(self, system: str) -> float | None:
        ours, other = self.of(system), self.best_baseline
        if ours is None or other is None or ours.status != "ok":
            return None
        return ours.samples_per_s / other.samples_per_s

    @property
    def leads(self) -> bool | None:
        """Whether ours is at least as fast as every baseline, within the spread of the two runs; None where there is
        nothing to compare."""
        ours, other = self.of(OURS), self.best_baseline
        if ours is None or other is None:
            return None
        return self.lead is not None and self.lead >= 1 - ours.spread - other.spread

    @property
    def predicted_best(self) -> float | None:
        """Measured throughput of what was predicted to be best, over the best that was measured; only among what the
        paper's setting allows. Ours where it ties: its space holds the others."""
        done = [run for run in self.runs if run.status == "ok" and run.system != _EXTENDED]
        if not done:
            return None
        chosen = max(done, key=lambda run: (run.batch / run.predicted_s, run.system == OURS))
        return chosen.samples_per_s / max(run.samples_per_s for run in done)


def columns(runs: Iterable[Run]) -> list[Column]:
    """In the order of the file's first mention. Systems that run one plan have what was measured of it."""
    found: dict[tuple[str, str], list[Run]] = {}
    counting = deciding(runs)
    for cell, run in counting.items():
        twin = counting.get(replace(cell, system=run.same_as))
        if twin is not None and twin.doing == run.doing:
            run = replace(twin, system=run.system, said_to_fit=run.said_to_fit, same_as=run.same_as)
        found.setdefault((cell.model, cell.budget), []).append(run)
    return [Column(model=model, budget=budget, runs=_pooled(systems)) for (model, budget), systems in found.items()]


def _pooled(runs: Sequence[Run]) -> tuple[Run, ...]:
    """With the iterations of one plan in one boot taken together, where systems ran it apart."""

    def alike(run: Run) -> tuple[object, ...]:
        return (run.program_run, run.facts.get("boot"))

    def all_of(run: Run) -> tuple[float, ...]:
        measured = dict.fromkeys(one.iterations_s for one in runs if one.status == "ok" and alike(one) == alike(run))
        return tuple(second for seconds in measured for second in seconds)

    ours = {run.system for run in runs if run.program == "galvatron" and run.status == "ok"}
    return tuple(replace(run, iterations_s=all_of(run)) if run.system in ours else run for run in runs)


@dataclass(frozen=True)
class BrokenPromises:
    """Runs of our runtime that were said to fit and ran out of memory."""

    standing: list[Run]
    mended: list[Run]
    """Of cells that were later planned with other figures of the cluster or the model, and then went well."""


def broken_promises(runs: Sequence[Run]) -> BrokenPromises:
    found = BrokenPromises(standing=[], mended=[])
    for number, run in enumerate(runs):
        if run.program == "galvatron" and not run.same_as and run.status == "oom" and run.said_to_fit:
            later = deciding(runs[number + 1 :]).get(run.cell)
            mended = later is not None and later.status == "ok" and later.figures != run.figures
            (found.mended if mended else found.standing).append(run)
    return found
