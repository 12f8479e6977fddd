"""How long the search takes, over layers, memory and dimensions: ours, a table-based one in the same run, the paper's.

    python benchmarks/paper/search_time.py [--quantum-mib 16] [--output results.json]

The paper's Figure "Search time costs with different numbers of layers": (a) its space under 4, 8 and 16 GB, (b) DP+TP,
DP+PP and all dimensions under 16 GB. It names no model; here it is BERT-Huge of those depths on the paper's machine,
with batches from 8 to 128 and at most 4 micro-batches. The table is the paper's own algorithm (``table_search``): even
cuts, memory in steps of a quantum. Ours finds its own cuts, to the byte. Ours is the best of three, the table one run;
both by processor time, which other people's processes do not change much.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

sys.path.append(str(Path(__file__).parent.parent))  # the table-based search is there

from galvatron.core.spec import GPIPE, Training
from galvatron.core.units import GIB
from galvatron.families import load_cluster, load_model
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.plan.paper import PAPER_MICRO_BATCHES
from galvatron.planner.search import Problem, search
from galvatron.planner.space import space_named
from table_search import table_search

__all__ = ["PAPER_S", "RESULTS", "Row", "measure", "points"]

RESULTS = Path(__file__).parent.parent / "results" / "paper_search_time.json"
LAYERS = (24, 48, 72, 96)
PAPER_S: dict[tuple[str, int], tuple[float, ...]] = {
    ("full", 4): (31.50363183, 61.8919251, 92.28021836, 122.6685116),
    ("full", 8): (62.47872353, 128.8907599, 195.3027964, 261.7148328),
    ("full", 16): (127.7061207, 253.7028897, 379.6996586, 505.6964276),
    ("dp+tp", 16): (10.32815886, 20.97259283, 31.61702681, 42.26146078),
    ("dp+pp", 16): (10.81789231, 21.54467845, 32.13630366, 46.23788142),
}
"""The figure's points, by space and memory in GiB, for each number of layers."""
_BATCHES = tuple(range(8, 129, 8))
_MIB = 2**20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One point of the figure."""

    space: str
    memory_gib: int
    layers: int
    ours_s: float
    table_s: float
    paper_s: float
    ours_samples_per_s: float | None
    """Of the plan found; None: nothing fits."""
    table_samples_per_s: float | None


def points() -> list[tuple[str, int, int, float]]:
    """Space, memory in GiB, layers, the paper's seconds."""
    return [
        (space, memory_gib, layers, paper_s)
        for (space, memory_gib), figures in PAPER_S.items()
        for layers, paper_s in zip(LAYERS, figures, strict=True)
    ]


def measure(space: str, memory_gib: int, layers: int, paper_s: float, quantum_mib: int) -> Row:
    cluster = load_cluster("titan-rtx-8")
    model = load_model(f"bert-huge-{layers}", Training())
    problem = Problem(
        cost=CostModel(model=model, cluster=cluster, conventions=GALVATRON, schedule=GPIPE),
        space=space_named(space),
        budget=memory_gib * GIB - cluster.reserved_bytes,
        batches=_BATCHES,
        max_micro_batches=PAPER_MICRO_BATCHES,
    )
    runs = [_timed(lambda: search(problem)) for _ in range(3)]
    ours_s, optimum = min(runs, key=lambda run: run[0])
    table_s, table = _timed(lambda: table_search(problem, quantum_mib * _MIB, each_transient=False))
    return Row(
        space=space,
        memory_gib=memory_gib,
        layers=layers,
        ours_s=ours_s,
        table_s=table_s,
        paper_s=paper_s,
        ours_samples_per_s=None if optimum is None else optimum.batch / (optimum.solved.iteration_ns / 1e9),
        table_samples_per_s=None if table is None else table.batch / (table.iteration_ns / 1e9),
    )


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantum-mib", type=int, default=16, help="memory step of the table")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    print(f"{'space':7} {'memory':>7} {'layers':>7} {'ours':>9} {'table':>9} {'paper':>9}")
    rows = []
    for space, memory_gib, layers, paper_s in points():
        row = measure(space, memory_gib, layers, paper_s, given.quantum_mib)
        rows.append(row)
        seconds = f"{row.ours_s:8.3f}s {row.table_s:8.2f}s {row.paper_s:8.1f}s"
        print(f"{space:7} {memory_gib:>4} GiB {layers:>6} {seconds}", flush=True)
    content = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "quantum_mib": given.quantum_mib,
        "batches": _BATCHES,
        "rows": [asdict(row) for row in rows],
    }
    given.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
