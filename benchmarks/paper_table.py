"""The paper's main table (8 TITAN RTX, 256 cells), predicted: what the cost model says against what the paper measured.

One profile of the paper's machine for all cells (docs/paper-profile.md): the cluster ``titan-rtx-8``, the layer times
``titan-rtx-*`` and the conventions of the systems the paper ran. Each strategy of the table is one of our spaces, with
the paper's rules: fp32, no recompute, GPipe, batches in steps of 8, "8G" meaning 8 GiB.

    python benchmarks/paper_table.py        prints the criteria and the table, writes benchmarks/results/paper_table.*
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from galvatron.core.spec import ADAMW, GPIPE, Attention, Precision, Training
from galvatron.core.units import GIB
from galvatron.families import load_cluster, load_model, paper_profile
from galvatron.planner.cost import PAPER_SYSTEMS, CostModel
from galvatron.planner.plan.paper import PAPER_MICRO_BATCHES, paper_stages_a_micro_batch
from galvatron.planner.search import Problem, most_micro_batches, search
from galvatron.planner.search.candidates import Candidates
from galvatron.planner.search.combination import Candidate, Combination
from galvatron.planner.search.cuts import CutRule, balanced_cuts
from galvatron.planner.search.layers import Layers
from galvatron.planner.space import divisors, space_named

__all__ = ["SPACES", "Cell", "Criteria", "Prediction", "Setting", "predict", "read_cells", "wrong_cells"]

HERE = Path(__file__).parent
SPACES = {
    "DP": "dp",
    "TP": "tp",
    "PP": "pp",
    "SDP": "sdp",
    "DS3D": "3d",
    "DP+TP": "dp+tp",
    "DP+PP": "dp+pp",
    "ours": "full",
}
"""The table's strategies and the spaces they are."""
PURE = ("DP", "TP", "PP", "SDP")
STEP = 8
"""Batch sizes of the table are multiples of it."""
LARGEST_BATCH = 256
"""Best batches are searched up to here; the table's largest is 216."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of the paper's table."""

    memory_gib: int
    strategy: str
    model: str
    throughput: float | None
    """Samples a second; None: out of memory."""
    batch: int | None

    @property
    def label(self) -> str:
        return f"{self.strategy} {self.model} {self.memory_gib}G"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the cost model says about one cell."""

    cell: Cell
    batch: int | None
    """The batch that would be run: the largest that fits for a pure strategy, which has no other choice to make, the
    fastest for the others; None: out of memory."""
    best_throughput: float | None
    """Highest throughput over all batches that fit."""
    throughput: float | None
    """At the paper's batch; where that does not fit, with as much memory as it takes (steps of 2%)."""
    extra_memory: float
    """Share of memory that the paper's batch was given on top."""

    @property
    def error(self) -> float | None:
        """Relative error of throughput at the paper's batch."""
        if self.throughput is None or self.cell.throughput is None:
            return None
        return self.throughput / self.cell.throughput - 1


def read_cells() -> list[Cell]:
    with (HERE / "data" / "paper_overall.csv").open(encoding="utf-8", newline="") as file:
        return [
            Cell(
                memory_gib=int(row["memory_gb"]),
                strategy=row["strategy"],
                model=row["model"],
                throughput=float(row["throughput"]) if row["throughput"] else None,
                batch=int(row["batch"]) if row["batch"] else None,
            )
            for row in csv.DictReader(file)
        ]


@cache
def _cost(model_name: str, machine: str) -> CostModel:
    cluster = replace(load_cluster(machine), fragmentation=0.0)  # the paper counts what is reserved only
    precision = Precision.FP32 if cluster.device.tf32_flops_per_s is None else Precision.TF32
    model = load_model(model_name.lower(), Training(precision=precision, attention=Attention.PAPER))
    profile = paper_profile(model, cluster)
    return CostModel(model=model, cluster=cluster, conventions=PAPER_SYSTEMS, profile=profile, schedule=GPIPE)


# ---------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: int
    seconds: float

    @property
    def throughput(self) -> float:
        return self.batch / self.seconds


class _Searched:
    """A strategy whose plans come from the search; stages are cut by the paper's guideline "memory" at each batch."""

    def __init__(self, strategy: str, model: str, machine: str) -> None:
        self.cost = _cost(model, machine)
        self.space = space_named(SPACES[strategy])

    def best(self, budget: int, batches: Iterable[int]) -> _Plan | None:
        """The fastest plan with any of these batches."""
        problem = Problem(
            cost=self.cost,
            space=self.space,
            budget=budget - self.cost.cluster.reserved_bytes,
            batches=tuple(batches),
            max_micro_batches=PAPER_MICRO_BATCHES,
            stages_a_micro_batch=paper_stages_a_micro_batch(self.cost.cluster.devices),
            cuts=CutRule.MEMORY,
        )
        optimum = search(problem)
        return _Plan(optimum.batch, optimum.solved.iteration_ns / 1e9) if optimum else None


class _PurePipeline:
    """Pure PP with the stages of a model cut once and kept, as one would by hand.

    The cut is the guideline "memory" at the largest batch that fits the least memory the model runs in at all.
    """

    def __init__(self, model: str, machine: str) -> None:
        self.cost = _cost(model, machine)
        self.stages = self.cost.cluster.devices
        self.costs = self.cost.stage(space_named("pp").strategies(1), self.stages)
        names = [kind.name for kind in self.cost.model.kinds]
        self.layers = Layers(np.array([names.index(layer.name) for layer in self.cost.model.layers]), len(names))
        self.positions: tuple[int, ...] | None = None

    def cut(self, budget: int, batches: Sequence[int]) -> None:
        """Settle the cut on the largest batch that fits this memory, unless it is settled or none fits."""
        if self.positions is None:
            fitting = [batch for batch in batches if self._plan(budget, batch, self._balanced(batch))]
            self.positions = self._balanced(fitting[-1]) if fitting else None

    def best(self, budget: int, batches: Iterable[int]) -> _Plan | None:
        plans = [self._plan(budget, batch, self.positions or self._balanced(batch)) for batch in batches]
        return max((plan for plan in plans if plan), key=lambda plan: plan.throughput, default=None)

    def _balanced(self, batch: int) -> tuple[int, ...]:
        kinds = self.cost.model.kinds
        memory = np.array(
            [ADAMW.bytes_per_parameter * kind.parameters + batch * kind.activation_bytes for kind in kinds]
        )
        memory = np.where(self.layers.total > 1, memory, 0.0)  # embedding, merges and head go where they stand
        return balanced_cuts(memory[self.layers.kinds], self.stages)

    def _plan(self, budget: int, batch: int, positions: tuple[int, ...]) -> _Plan | None:
        times = []
        growing = paper_stages_a_micro_batch(self.stages)
        most = most_micro_batches(PAPER_MICRO_BATCHES, growing, self.stages) or batch
        for micro_batches in divisors(batch):
            if micro_batches <= most:
                solved = Combination(
                    self.layers,
                    Candidates(self.costs),
                    Candidate(self.stages, batch, micro_batches),
                    schedule=GPIPE,
                    budget=budget - self.cost.cluster.reserved_bytes,
                    positions=positions,
                ).solve(np.inf)
                if solved:
                    times.append(solved.iteration_ns / 1e9)
        return _Plan(batch, min(times)) if times else None


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a table was measured: the machine, its memories, the largest batch that is tried."""

    machine: str
    memories_gib: tuple[int, ...]
    largest_batch: int

    @property
    def batches(self) -> range:
        return range(STEP, self.largest_batch + 1, STEP)


EIGHT = Setting("titan-rtx-8", (8, 12, 16, 20), LARGEST_BATCH)


@cache
def _system(strategy: str, model: str, setting: Setting) -> _Searched | _PurePipeline:
    if strategy != "PP":
        return _Searched(strategy, model, setting.machine)
    pipeline = _PurePipeline(model, setting.machine)
    for memory_gib in setting.memories_gib:
        pipeline.cut(memory_gib * GIB, setting.batches)
    return pipeline


# ----------------------------------------------------------------------------------------------------- predictions


def predict(cell: Cell, setting: Setting = EIGHT) -> Prediction:
    system, budget = _system(cell.strategy, cell.model, setting), cell.memory_gib * GIB
    best = system.best(budget, setting.batches)
    batch = best.batch if best else None
    if best and cell.strategy in PURE:
        batch = max(size for size in setting.batches if system.best(budget, (size,)))
    plan, extra = None, 0.0
    if cell.batch is not None:
        plan = system.best(budget, (cell.batch,))
        while plan is None:
            extra += 0.02
            plan = system.best(int(budget * (1 + extra)), (cell.batch,))
    return Prediction(
        cell=cell,
        batch=batch,
        best_throughput=best.throughput if best else None,
        throughput=plan.throughput if plan else None,
        extra_memory=round(extra, 2),
    )


@dataclass(frozen=True)
class Criteria:
    """The figures by which the predictions are judged."""

    predictions: tuple[Prediction, ...]

    @cached_property
    def memory_right(self) -> int:
        """Cells whose fitting or not fitting at all is predicted."""
        return sum((p.batch is None) == (p.cell.batch is None) for p in self.predictions)

    @cached_property
    def pure(self) -> tuple[Prediction, ...]:
        return tuple(p for p in self.predictions if p.cell.strategy in PURE and p.cell.batch is not None)

    @cached_property
    def batches_right(self) -> int:
        return sum(p.batch == p.cell.batch for p in self.pure)

    @cached_property
    def largest_batch_miss(self) -> int:
        return max(abs((p.batch or 0) - (p.cell.batch or 0)) for p in self.pure)

    def errors(self, *strategies: str) -> list[float]:
        return [p.error for p in self.predictions if p.error is not None and p.cell.strategy in strategies]

    @cached_property
    def absolute_errors(self) -> list[float]:
        """All but DeepSpeed-3D's, whose row of the paper is erratic."""
        return [abs(error) for error in self.errors(*(s for s in SPACES if s != "DS3D"))]

    @cached_property
    def median_error(self) -> float:
        return statistics.median(self.absolute_errors)

    @cached_property
    def high_error(self) -> float:
        """90th percentile."""
        return float(np.quantile(self.absolute_errors, 0.9))

    @cached_property
    def cells_led(self) -> int:
        """Of the (memory, model) pairs, those where ours is at least as fast as every baseline."""
        groups: dict[tuple[int, str], list[Prediction]] = {}
        for prediction in self.predictions:
            groups.setdefault((prediction.cell.memory_gib, prediction.cell.model), []).append(prediction)
        return sum(
            max(p.best_throughput or 0 for p in group)
            == next(p for p in group if p.cell.strategy == "ours").best_throughput
            or not any(p.best_throughput for p in group)
            for group in groups.values()
        )

    def as_dict(self) -> dict[str, float]:
        return {
            "cells": len(self.predictions),
            "memory_right": self.memory_right,
            "pure_batches": len(self.pure),
            "pure_batches_right": self.batches_right,
            "largest_batch_miss": self.largest_batch_miss,
            "median_error": round(self.median_error, 4),
            "error_90th_percentile": round(self.high_error, 4),
            "pairs_led_by_ours": self.cells_led,
        }


def wrong_cells(predictions: Iterable[Prediction]) -> Iterator[str]:
    """The cells whose fitting is wrong, or for pure strategies the batch."""
    for p in predictions:
        fits = (p.batch is None) == (p.cell.batch is None)
        if not fits or (p.cell.strategy in PURE and p.batch != p.cell.batch):
            yield f"{p.cell.label}: batch {p.batch or 'OOM'}, paper {p.cell.batch or 'OOM'}"


# ---------------------------------------------------------------------------------------------------------- report


def report(criteria: Criteria) -> str:
    lines = ["The paper's main table, predicted with one profile of its machine", ""]
    lines += [
        f"  out of memory or not   {criteria.memory_right} of {len(criteria.predictions)} cells right",
        f"  batch, pure strategies {criteria.batches_right} of {len(criteria.pure)} right, "
        f"the others at most {criteria.largest_batch_miss} off",
        f"  throughput             median error {criteria.median_error:.1%}, "
        f"90th percentile {criteria.high_error:.1%} (without DS3D)",
        f"  ours leads             {criteria.cells_led} of 32 pairs of model and memory",
        "",
        "Throughput error at the paper's batch      cells   median     90%    mean",
    ]
    for strategy in SPACES:
        errors = criteria.errors(strategy)
        sizes = [abs(error) for error in errors]
        lines.append(
            f"  {strategy:<40} {len(errors):>5}  {statistics.median(sizes):>6.1%}  {np.quantile(sizes, 0.9):>6.1%}  "
            f"{statistics.mean(errors):>+6.1%}"
        )
    lines += ["", "Predicted / paper samples a second (batch) at the paper's batch; - is out of memory"]
    models = list(dict.fromkeys(p.cell.model for p in criteria.predictions))
    for model in models:
        lines += ["", f"{model:<8}" + "".join(f"{memory:>24}G" for memory in (8, 12, 16, 20))]
        for strategy in SPACES:
            row = [p for p in criteria.predictions if p.cell.model == model and p.cell.strategy == strategy]
            row.sort(key=lambda p: p.cell.memory_gib)
            lines.append(f"{strategy:<8}" + "".join(f"{_entry(p):>25}" for p in row))
    return "\n".join([*lines, "", "Wrong cells", *(f"  {line}" for line in wrong_cells(criteria.predictions))])


def _entry(p: Prediction) -> str:
    mark = "" if (p.batch is None) == (p.cell.batch is None) else "!"
    if p.throughput is None:
        return f"{'-' if p.batch is None else f'fits({p.batch})'} / -{mark}"
    return f"{p.throughput:.2f} / {p.cell.throughput:.2f} ({p.cell.batch}){mark}"


def write(criteria: Criteria, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "paper_table.json").write_text(json.dumps(criteria.as_dict(), indent=2) + "\n", encoding="utf-8")
    with (folder / "paper_table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [*Cell.__dataclass_fields__, "predicted_batch", "predicted_best", "predicted", "error", "extra_memory"]
        )
        for p in criteria.predictions:
            figures = [p.best_throughput, p.throughput, p.error]
            rounded = ["" if figure is None else f"{figure:.4f}" for figure in figures]
            cell = ["" if value is None else value for value in asdict(p.cell).values()]
            writer.writerow([*cell, p.batch or "", *rounded, p.extra_memory or ""])


if __name__ == "__main__":
    table = Criteria(tuple(predict(cell) for cell in read_cells()))
    print(report(table))
    write(table, HERE / "results")
