"""The cells of the main table and what was run for them: one JSON line a run, appended as soon as it ends.

A cell is a model, a budget and a system. It takes one run, or several where a batch runs out of memory and the next
smaller one is tried. No torch here: whoever reads results needs none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = [
    "BATCH_STEP",
    "RESULTS",
    "Cell",
    "Run",
    "Status",
    "append",
    "batch_to_try",
    "deciding",
    "read_runs",
    "settled",
]

RESULTS = Path(__file__).parent.parent / "results" / "paper_main.jsonl"
BATCH_STEP = 8
"""Batches are multiples of it, as in the paper; it is also the smallest."""
Status = str
"""``ok``, ``oom`` (out of memory, for real) or ``failed``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of the table."""

    model: str
    budget: str
    """Memory of each GPU as people write it: "8GB"."""
    system: str

    def __str__(self) -> str:
        return f"{self.model} {self.budget} {self.system}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a cell: what was predicted, what happened."""

    model: str
    budget: str
    system: str
    program: str
    """``stock``: PyTorch's own program on the stock model; ``galvatron``: our runtime."""
    batch: int
    micro_batches: int
    schedule: str
    said_to_fit: bool
    """Whether the planner says that the plan fits; where nothing does, the smallest batch is run all the same."""
    predicted_s: float
    predicted_without_slowdown_s: float
    """The same plan priced as if computation and communication did not slow each other down."""
    predicted_bytes: int
    """Tensors of the fullest rank; the budget holds ``reserved_bytes`` besides."""
    reserved_bytes: int
    status: Status
    message: str = ""
    iterations_s: tuple[float, ...] = ()
    """Timed iterations, each of its slowest rank."""
    peak_bytes: tuple[int, ...] = ()
    """Of each rank: most bytes of tensors alive."""
    allocator_bytes: tuple[int, ...] = ()
    """Of each rank: most bytes that the allocator took for them, which the budget caps. Both without workspaces, which
    are among the reserved bytes."""
    shortages: tuple[int, ...] = ()
    """Of each rank: how often the allocator ran short, gave back what it kept and asked again."""
    plan: tuple[str, ...] = ()
    """A stage each: its layers in runs, "encoder×16 dp2-tp4; head tp8"."""
    same_as: str = ""
    """A system of the cell that runs this very plan in our runtime, and whose measurements these are."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Where and when: versions, device, boot of the machine, digests of cluster and profile."""

    @property
    def cell(self) -> Cell:
        return Cell(model=self.model, budget=self.budget, system=self.system)

    @property
    def program_run(self) -> tuple[Any, ...]:
        """What two runs that do the same by the same figures have in common."""
        return (self.model, self.budget, self.figures, self.doing)

    @property
    def figures(self) -> tuple[Any, ...]:
        """Of cluster and model, that it was planned with."""
        return (self.facts.get("cluster"), self.facts.get("profile"))

    @property
    def doing(self) -> tuple[Any, ...]:
        return (self.program, self.batch, self.micro_batches, self.schedule, self.plan)

    @property
    def iteration_s(self) -> float:
        return statistics.median(self.iterations_s)

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.iteration_s

    @property
    def spread(self) -> float:
        """The iterations' standard deviation, over the median."""
        return statistics.stdev(self.iterations_s) / self.iteration_s if len(self.iterations_s) > 1 else 0.0


def append(path: Path, run: Run) -> None:
    """Add a line; the throughput is written out for people who read the file."""
    line = asdict(run)
    if run.status == "ok":
        line["samples_per_s"] = round(run.samples_per_s, 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_runs(path: Path) -> list[Run]:
    """All runs of a results file, oldest first; none where there is no file yet."""
    if not path.exists():
        return []
    known = {one.name for one in fields(Run)}
    runs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.endswith("}"):
            continue  # of a call that was killed as it wrote
        content = {name: value for name, value in json.loads(line).items() if name in known}
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        runs.append(Run(**{**content, **lists}))
    return runs


def deciding(runs: Iterable[Run]) -> dict[Cell, Run]:
    """The run that counts of each cell: the last that went well, or where none did the last."""
    found: dict[Cell, Run] = {}
    for run in runs:
        before = found.get(run.cell)
        if before is None or run.status == "ok" or before.status != "ok":
            found[run.cell] = run
    return found


def settled(cell: Cell, runs: Iterable[Run]) -> bool:
    """Whether the cell needs no further run. One that failed, whyever, gets a second try."""
    own = [run for run in runs if run.cell == cell]
    counts = deciding(own).get(cell)
    if counts is None:
        return False
    if counts.status == "failed":
        return sum(run.status == "failed" for run in own) > 1
    return counts.status == "ok" or counts.batch <= BATCH_STEP


def batch_to_try(cell: Cell, runs: Iterable[Run]) -> int | None:
    """The batch below the smallest that ran out of memory; None: none has."""
    tried = [run.batch for run in runs if run.cell == cell and run.status == "oom"]
    return min(tried) - BATCH_STEP if tried else None
