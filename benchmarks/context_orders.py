"""What rule context-1 loses: the best plans with Ring and Ulysses axes in one order and in every order over the links.

    python benchmarks/context_orders.py

Long samples on clusters whose links differ, where the order matters. Writes a row for each request that fits.
"""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path

from galvatron.core.errors import GalvatronError
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import try_plan
from galvatron.planner.plan.setup import request_for

RESULTS = Path(__file__).parent / "results" / "context_orders.json"
CLUSTERS = ("h100-16", "a100-16", "a100-80gb-16", "h100-pcie-8", "h100-pcie-16", "rtx4090-16", "l40s-16")
LARGER = ("h100-64", "rtx4090-64", "a100-64")
MODELS = (("llama3.2-1b", 32768), ("llama3-8b", 32768), ("llama3-8b", 131072), ("llama2-13b", 65536))


def _searched(model: str, cluster: str, setup: Setup) -> tuple[Plan | None, float]:
    started = time.process_time()
    return try_plan(request_for(model, cluster, setup)), time.process_time() - started


def _row(model: str, cluster: str, setup: Setup) -> dict[str, object] | None:
    usual, usual_s = _searched(model, cluster, setup)
    every, every_s = _searched(model, cluster, setup | {"context_orders": True})
    if usual is None or every is None:
        return None
    return {
        "model": model,
        "cluster": cluster,
        **setup,
        "samples_per_s": usual.throughput,
        "gain": every.throughput / usual.throughput - 1,
        "search_s": round(usual_s, 2),
        "search_every_order_s": round(every_s, 2),
    }


def main() -> None:
    rows = []
    asked = [*product(MODELS, CLUSTERS, (8, 64)), *product(MODELS[1:], LARGER, (64,))]
    for (model, tokens), cluster, batch in asked:
        try:
            row = _row(model, cluster, {"sequence_length": tokens, "batch": batch})
        except GalvatronError as error:
            print(f"{model} on {cluster}: {error}")
            continue
        if row is not None:
            rows.append(row)
            print(json.dumps(row), flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    gains = [float(str(row["gain"])) for row in rows]
    print(f"{len(rows)} requests; every order gains at most {max(gains):.2%}, {sum(own > 1e-9 for own in gains)} gain")


if __name__ == "__main__":
    main()
