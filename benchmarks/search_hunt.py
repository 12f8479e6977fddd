"""A hunt for slow searches: random requests, feasible or not, with budgets that are often tight.

    python benchmarks/search_hunt.py [--devices 8 64 1024]   runs what is not in the results yet, then writes the table
    python benchmarks/search_hunt.py --table                 only writes the table of docs/evidence.md

Every request is made from its number, so that all runs ask the same. A row has what was asked, the processor time of
`galvatron plan` without the start of Python, and what came out of it. Each request has a process of its own: nothing
that an earlier one computed is left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import resource
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from galvatron.core.errors import GalvatronError
from galvatron.planner.plan.advice import make_plan, smallest_budget
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import request_for

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "search_hunt.jsonl"
PAGE, BEGIN, END = ROOT / "docs" / "evidence.md", "<!-- search-hunt -->\n", "<!-- /search-hunt -->"
LIMIT_S = 120
"""Processor time after which a request is given up."""
COUNTS, GOALS_S = {8: 400, 64: 50, 1024: 16}, {8: 2, 64: 5, 1024: 10}
"""By devices: how many requests, and how many seconds none should take."""
CLUSTERS = {
    8: ["a100", "a100-80gb", "h100", "h100-pcie", "titan-rtx-8", "rtx4090", "l40s", "b200"],
    64: ["a100-64", "h100-64", "l40s-64"],
    1024: ["a100-1024", "h100-1024", "h200-1024"],
}
MODELS = [
    *("bert-huge-32", "bert-huge-48", "bert-huge-96", "bert-xhuge", "bert-large", "vit-huge-32", "vit-huge-48"),
    *("vit-xhuge", "vit-large", "t5-large-32", "t5-large-48", "t5-large-96", "t5-large", "swin-huge-32"),
    *("swin-huge-48", "swin-huge-96", "swin-large", "gpt2-large", "gpt2-xl", "gpt3-6.7b", "gpt3-13b", "llama2-7b"),
    *("llama2-13b", "llama3-8b", "llama3.2-3b"),
]
LARGE = ["gpt3-175b", "llama2-70b", "llama3-70b", "llama3.1-405b"]
"""Asked for twice as often as others, where there are more than 8 devices."""
NAMED: list[tuple[str, str, Setup]] = [
    ("gpt3-175b", "a100-64", {}),
    ("llama2-70b", "a100-64", {"memory": "2GiB"}),
    ("bert-huge-32", "h100-64", {"memory": "2GiB"}),
    ("bert-huge-32", "h100-1024", {"memory": "2GiB"}),
    ("t5-large-48", "h100-64", {"memory": "2GiB"}),
    ("llama3-70b", "h100-1024", {"memory": "2GiB"}),
    ("llama3-70b", "h100-1024", {"batch": 1024}),
    ("bert-xhuge", "h100", {"precision": "fp32", "batch": 64, "schedule": "gpipe", "memory": "31742658414B"}),
    ("bert-xhuge", "a100", {"batch": 32, "memory": "27192262324B"}),
    ("bert-huge-96", "a100-64", {"precision": "fp32", "batch": 128, "schedule": "gpipe", "memory": "8902039499B"}),
    ("bert-xhuge", "a100-80gb", {"batch": 16, "memory": "24150420806B"}),
    ("bert-huge-96", "a100-80gb", {"recompute": False, "memory": "5820296146B"}),
    ("t5-base", "a100", {"precision": "tf32", "cuts": "memory", "accumulation": False, "memory": "2480627174B"}),
    ("gpt3-175b", "h200-512", {"batch": "best", "schedule": "gpipe", "cuts": "parameters", "memory": "7GiB"}),
    ("vit-huge-48", "b200:96x8", {"batch": "best", "memory": "1.53GiB"}),
    ("swin-huge-32", "a100-64", {"schedule": "gpipe", "memory": "6073631188B"}),
    ("swin-huge-48", "h100-64", {"schedule": "gpipe", "memory": "7GB"}),
]
"""Requests that once were slow."""


def random_request(devices: int, number: int) -> tuple[str, str, Setup]:
    """The request of this number. A quarter has all of the memory, a third some part of it, the rest about what the
    smallest batch needs."""
    rng = np.random.default_rng((0, devices, number))
    model = str(rng.choice(MODELS if devices == 8 else MODELS + 2 * LARGE))
    cluster = str(rng.choice(CLUSTERS[devices]))
    setup: Setup = {}
    if rng.random() < 0.6:
        setup["batch"] = int(devices * 2.0 ** rng.integers(-1, 5))
    if rng.random() < 0.4:
        setup["precision"] = "fp32"
    if rng.random() < 0.5:
        setup["schedule"] = "gpipe"
    if rng.random() < 0.25:
        setup["recompute"] = False
    if rng.random() < 0.15:
        setup["space"] = str(rng.choice(["3d", "dp+tp", "dp+pp", "sdp"]))
    how, part = rng.random(), rng.random()
    request = request_for(model, cluster, setup)
    most = request.cluster.device.memory_bytes
    if how < 0.35:
        setup["memory"] = f"{int(most * 0.03**part)}B"
    elif how < 0.75:
        least = alone(_least, request)["bytes"]
        setup["memory"] = f"{min(most, int(least * (0.98 + 0.7 * part * part))) if least else most}B"
    return model, cluster, setup


def _least(request: Request) -> dict[str, Any]:
    least = smallest_budget(request)
    return {"bytes": None if least is None else least[0]}


def _planned(request: Request) -> dict[str, Any]:
    started = time.process_time()
    try:
        plan = make_plan(request)
    except GalvatronError as error:
        return {"cpu_s": time.process_time() - started, "error": str(error).splitlines()[0]}
    facts = plan.to_dict()
    del facts["certificate"]  # its counts say how the search went, not what it found
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return {"cpu_s": time.process_time() - started, "iteration_s": plan.iteration_s, "plan": digest}


def alone(work: Callable[[Request], dict[str, Any]], request: Request) -> dict[str, Any]:
    """What a process of its own finds for a request."""
    mother, child = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(child, work, request))
    process.start()
    child.close()
    try:
        found: dict[str, Any] = mother.recv()
    except EOFError:
        found = {"cpu_s": LIMIT_S, "gave_up": True}
    process.join()
    return found


def _send(child: Connection, work: Callable[[Request], dict[str, Any]], request: Request) -> None:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(spent.ru_utime + spent.ru_stime + LIMIT_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    child.send(work(request))


def hunt(devices: list[int]) -> None:
    """Run all requests that have no result yet."""
    done = {(row["devices"], row["number"]) for row in read()}
    for number, asked in enumerate(NAMED):
        if (0, number) not in done:
            write(0, number, *asked)
    for each in devices:
        for number in range(COUNTS[each]):
            if (each, number) not in done:
                write(each, number, *random_request(each, number))


def write(devices: int, number: int, model: str, cluster: str, setup: Setup) -> None:
    found = alone(_planned, request_for(model, cluster, setup))
    found["cpu_s"] = round(found["cpu_s"], 3)
    row = {"devices": devices, "number": number, "model": model, "cluster": cluster, "setup": setup, **found}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Of the random requests by devices, and of the named ones."""
    yield "| random requests | fit | do not fit | median | 9 of 10 below | slowest | goal | above it |"
    yield "|---|---|---|---|---|---|---|---|"
    for devices, goal_s in GOALS_S.items():
        some = [row for row in rows if row["devices"] == devices]
        if not some:
            continue
        seconds = np.array([row["cpu_s"] for row in some])
        fit = sum("plan" in row for row in some)
        middle, most = np.quantile(seconds, [0.5, 0.9])
        yield (
            f"| {len(some)} on {devices:,} devices | {fit} | {len(some) - fit} | {middle:.2f} s | {most:.2f} s "
            f"| {seconds.max():.2f} s | {goal_s} s | {int((seconds > goal_s).sum())} |"
        )
    yield ""
    yield "| requests that once were slow | |"
    yield "|---|---|"
    for row in sorted((row for row in rows if row["devices"] == 0), key=lambda row: row["number"]):
        said = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in row["setup"].items())
        said = re.sub(r"--(\w+) False", r"--no-\1", said)
        fits = "" if "plan" in row else " (does not fit)"
        command = f"{row['model']} --cluster {row['cluster']} {said}".strip()
        yield f"| `{command}` | {row['cpu_s']:.2f} s{fits} |"


def write_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "\n".join(table(read())) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=list(COUNTS), choices=list(COUNTS))
    parser.add_argument("--table", action="store_true", help="only write the table")
    asked = parser.parse_args()
    if not asked.table:
        hunt(asked.devices)
    write_table()


if __name__ == "__main__":
    main()
