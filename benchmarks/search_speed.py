"""How fast the search is: beside the paper's table in one run, and as whole commands.

    python benchmarks/search_speed.py            prints tables, writes benchmarks/results/search_speed.json
    python benchmarks/search_speed.py --quick    without the one-MiB tables, commands once instead of five times

Three parts. *Combination*: one batch, pipeline degree, number of micro-batches and even cuts, solved by both, so the
same problem. *Search*: one batch, all of the rest; the table takes the paper's even cuts, the search finds its own.
*Commands*: what a user waits for, Python's start included, and how long presets take to be read.

The table is timed in two ways: with one table a stage that sets the largest transient of all strategies aside ("once"),
which is the paper's cost but a poorer plan, and with a table for each transient ("each"), which is the problem the
search solves. Times of ours are the best of several, of the table a single run: it takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np

from galvatron.core.files.clusters import load_cluster
from galvatron.core.spec import GPIPE, Training
from galvatron.families import load_model, model_names
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.search import Candidates, Problem, search
from galvatron.planner.search.combination import Candidate, Combination
from galvatron.planner.search.layers import Layers
from galvatron.planner.space import space_named
from table_search import even_cuts, solve_combination, table_search

MIB = 2**20
QUANTA_MIB = (1, 16, 64)
BATCHES = {"bert-huge-96": 16, "t5-large-96": 8, "swin-huge-96": 32}
"""The models, each with a batch for which memory is scarce."""
COMBINATIONS = ((1, 1), (2, 4), (4, 8))
"""Pipeline degree and micro-batches of the combinations compared."""
RESULTS = Path(__file__).parent / "results" / "search_speed.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: seconds and iteration time of ours and of a table."""

    model: str
    what: str
    quantum_mib: int
    transients: str
    ours_s: float
    table_s: float
    ours_ns: int | None
    table_ns: int | None

    @property
    def speedup(self) -> float:
        return self.table_s / self.ours_s

    @property
    def slower_by(self) -> str:
        """How much longer an iteration of the table's plan takes."""
        if self.ours_ns is None or self.table_ns is None:
            return "no plan" if self.ours_ns is not None else "-"
        return f"{self.table_ns / self.ours_ns - 1:+.2%}"


def best_of(times: int, run: Callable[[], T]) -> tuple[float, T]:
    """Seconds and result of the fastest of several runs; no further ones once they took a minute."""
    runs: list[tuple[float, T]] = []
    while len(runs) < times and sum(seconds for seconds, _ in runs) < 60:
        started = time.perf_counter()
        result = run()
        runs.append((time.perf_counter() - started, result))
    return min(runs, key=lambda timed: timed[0])


def problem_for(model: str) -> Problem:
    """A model of the paper on its 8 GPUs with 16 GiB each, in the paper's space."""
    cluster = load_cluster("titan-rtx-8")
    return Problem(
        cost=CostModel(model=load_model(model, Training()), cluster=cluster, conventions=GALVATRON, schedule=GPIPE),
        space=space_named("full"),
        budget=16 * 1024 * MIB - cluster.reserved_bytes,
        batches=(BATCHES[model],),
    )


def compare_combination(name: str, degree: int, micro_batches: int, quanta_mib: tuple[int, ...]) -> list[Row]:
    """One combination with even cuts, solved by both."""
    problem = problem_for(name)
    batch, model = BATCHES[name], problem.cost.model
    costs = problem.cost.stage(problem.space.strategies(problem.cost.cluster.devices // degree), degree)
    positions = next(iter(even_cuts(len(model.layers), degree)))
    kinds = [kind.name for kind in model.kinds]
    layers = Layers(np.array([kinds.index(layer.name) for layer in model.layers]), len(kinds))

    def ours() -> int | None:
        solved = Combination(
            layers,
            Candidates(costs),
            Candidate(degree, batch, micro_batches),
            schedule=problem.schedule,
            budget=problem.budget,
            positions=positions,
        ).solve(np.inf)
        return solved.iteration_ns if solved else None

    ours_s, ours_ns = best_of(5, ours)
    rows = []
    for quantum, each in product(quanta_mib, (False, True)):

        def table(quantum: int = quantum, each: bool = each) -> int | None:
            plan = solve_combination(
                problem, costs, batch, micro_batches, positions, quantum * MIB, each_transient=each
            )
            return plan.iteration_ns if plan else None

        table_s, table_ns = best_of(1, table)
        what = f"{degree} stage{'s' if degree > 1 else ''} × {micro_batches}"
        rows.append(Row(name, what, quantum, "each" if each else "once", ours_s, table_s, ours_ns, table_ns))
    return rows


def compare_search(name: str, quanta_mib: tuple[int, ...]) -> list[Row]:
    """All pipeline degrees, micro-batches and cuts of one batch."""
    problem = problem_for(name)
    ours_s, optimum = best_of(5, lambda: search(problem))
    rows = []
    for quantum, each in product(quanta_mib, (False, True)):

        def table(quantum: int = quantum, each: bool = each) -> int | None:
            plan = table_search(problem, quantum * MIB, each_transient=each)
            return plan.iteration_ns if plan else None

        table_s, table_ns = best_of(1, table)
        ours_ns = optimum.solved.iteration_ns if optimum else None
        rows.append(Row(name, "search", quantum, "each" if each else "once", ours_s, table_s, ours_ns, table_ns))
    return rows


# ------------------------------------------------------------------------------------------------------- commands

DEEP_MODEL = """name = "deep-1000"

[[layers]]
name = "block"
count = 1000
parameters = 805_306_368
replicated_parameters = 73_728
forward_flops = 7.15e12
split_activation_bytes = "1.75GiB"
replicated_activation_bytes = "512MiB"
boundary_bytes = "128MiB"
transient_bytes = "1GiB"
tensor_parallel = { heads = 64 }
"""
"""1000 layers of 0.8 billion parameters, 4096 tokens of width 8192."""

QUESTIONS = (
    "llama3-8b --cluster h100 --batch 128",
    "llama3-8b --cluster a100 --devices 8 --memory 30GiB",
    "bert-huge-32 --cluster titan-rtx-8 --memory 8GiB",
    "gpt2-xl --cluster rtx4090 --devices 8",
    "llama3-8b --cluster h100-8 --batch 64 --lora 16",
)
"""What people ask of eight devices."""


@dataclass(frozen=True, slots=True)
class Command:
    """Seconds of a whole command; None where it failed."""

    arguments: str
    best_s: float | None
    search_s: float | None
    """What the plan itself says its search took."""


def time_command(arguments: list[str], shown: str, times: int) -> Command:
    """Best of several runs of ``python -m galvatron`` in a process of its own."""
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "galvatron", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    seconds, done = best_of(times, run)
    if done.returncode:
        print(f"  galvatron {shown}: exit status {done.returncode}: {done.stderr.strip()[-300:]}")
        return Command(shown, None, None)
    search_s = json.loads(done.stdout).get("search_s") if "--json" in arguments else None
    return Command(shown, seconds, search_s)


def time_commands(times: int) -> list[Command]:
    with tempfile.TemporaryDirectory() as folder:
        deep = Path(folder) / "deep-1000.toml"
        deep.write_text(DEEP_MODEL, encoding="utf-8")
        paper = ["plan", "bert-huge-96", "--cluster", "titan-rtx-8", "--memory", "16GiB", "--json"]
        large = ["plan", str(deep), "--cluster", "h100-1024", "--batch", "2048", "--json"]
        commands = [["--help"], paper, large, *(["plan", *question.split(), "--json"] for question in QUESTIONS)]
        return [time_command(each, " ".join(each).replace(str(deep), deep.name), times) for each in commands]


def time_presets() -> dict[str, float]:
    """Seconds in which each preset is read."""
    return {name: best_of(3, partial(load_model, name, Training()))[0] for name in model_names()}


# ---------------------------------------------------------------------------------------------------------- report


def show(rows: list[Row]) -> None:
    head = f"{'model':<14} {'what':<14} {'quantum':>8} {'θ':>5} {'ours':>10} {'table':>10} {'ratio':>8}  its plan"
    print(head + "\n" + "-" * len(head))
    for row in rows:
        print(
            f"{row.model:<14} {row.what:<14} {row.quantum_mib:>4} MiB {row.transients:>5} {row.ours_s * 1e3:>7.1f} ms "
            f"{row.table_s:>8.2f} s {row.speedup:>7.0f}×  {row.slower_by}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no one-MiB tables, commands once")
    quick = parser.parse_args().quick
    quanta = QUANTA_MIB[1:] if quick else QUANTA_MIB
    rows: list[Row] = []
    for name in BATCHES:
        for degree, micro_batches in COMBINATIONS:
            rows += compare_combination(name, degree, micro_batches, quanta)
        rows += compare_search(name, quanta)
    show(rows)
    print()
    commands = time_commands(1 if quick else 5)
    for command in commands:
        if command.best_s is not None:
            inside = "" if command.search_s is None else f", of which search {command.search_s * 1e3:.0f} ms"
            print(f"galvatron {command.arguments}: {command.best_s:.2f} s{inside}")
    presets = time_presets()
    slowest = max(presets, key=presets.__getitem__)
    print(f"{len(presets)} presets are read in {presets[slowest] * 1e3:.1f} ms ({slowest}) or less each")
    results = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "batches": BATCHES,
        "comparisons": [{**asdict(row), "speedup": round(row.speedup, 1)} for row in rows],
        "commands": [asdict(command) for command in commands],
        "presets_s": presets,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
