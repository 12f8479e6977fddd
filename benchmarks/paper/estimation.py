"""How far predictions are from what was measured, per model: time with and without the overlap slowdown, and memory.

    python benchmarks/paper/estimation.py [--results FILE.jsonl]

From the runs of ``main_table.py``. Time is that of an iteration; without the slowdown the same plan is priced as if
computation and communication did not slow each other down. Memory is that of the fullest rank's tensors. Stock programs
are apart: the planner models our runtime, and prices them as the plan that they amount to.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cells import RESULTS, Run, deciding, read_runs

__all__ = ["Estimation", "estimations", "memory_error", "time_error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimation:
    """Mean absolute errors of the predictions of some runs, relative to what was measured."""

    model: str
    program: str
    runs: int
    time: float
    time_without_slowdown: float
    memory: float
    bias: float
    """Mean error of time with its sign: below zero where iterations take longer than predicted."""
    bias_without_slowdown: float


def time_error(run: Run) -> float:
    return run.predicted_s / run.iteration_s - 1


def time_error_without_slowdown(run: Run) -> float:
    return run.predicted_without_slowdown_s / run.iteration_s - 1


def memory_error(run: Run) -> float:
    return run.predicted_bytes / max(run.peak_bytes) - 1


def estimations(runs: Iterable[Run]) -> list[Estimation]:
    """For each model, and for all of them together, the cells of our runtime and those of stock programs, each once."""
    done = _counted(runs)
    models = list(dict.fromkeys(run.model for run in done))
    found = []
    for program in ("galvatron", "stock"):
        own = [run for run in done if run.program == program]
        groups = {model: [run for run in own if run.model == model] for model in models}
        if len(models) > 1:
            groups["all"] = own
        found += [_estimation(model, program, group) for model, group in groups.items() if group]
    return found


def _counted(runs: Iterable[Run]) -> list[Run]:
    """The run of each cell that counts, and that is no other system's."""
    return [run for run in deciding(runs).values() if run.status == "ok" and not run.same_as]


def _estimation(model: str, program: str, runs: Sequence[Run]) -> Estimation:
    def mean(error: Callable[[Run], float]) -> float:
        return statistics.fmean(abs(error(run)) for run in runs)

    return Estimation(
        model=model,
        program=program,
        runs=len(runs),
        time=mean(time_error),
        time_without_slowdown=mean(time_error_without_slowdown),
        memory=mean(memory_error),
        bias=statistics.fmean(time_error(run) for run in runs),
        bias_without_slowdown=statistics.fmean(time_error_without_slowdown(run) for run in runs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    runs = read_runs(parser.parse_args().results)
    print(f"{'run':55} {'predicted':>10} {'measured':>10} {'time':>7} {'without slowdown':>17} {'memory':>7}")
    for run in _counted(runs):
        errors = f"{time_error(run):+7.1%} {time_error_without_slowdown(run):+17.1%} {memory_error(run):+7.1%}"
        print(f"{run.cell!s:40} {run.program:>14} {run.predicted_s:9.3f}s {run.iteration_s:9.3f}s {errors}")
    print(f"\n{'mean absolute error':30} {'runs':>5} {'time':>7} {'without slowdown':>17} {'memory':>7}")
    for one in estimations(runs):
        print(
            f"{one.model:15} {one.program:14} {one.runs:>5} {one.time:7.1%} {one.time_without_slowdown:17.1%} "
            f"{one.memory:7.1%}"
        )


if __name__ == "__main__":
    main()
