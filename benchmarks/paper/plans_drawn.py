"""The optimal plans for BERT-Huge-32 and Swin-Huge-32 at 8 and 12 GB, drawn as the paper's Figure of plans draws them.

    python benchmarks/paper/plans_drawn.py [--cluster cluster.toml --profiles folder] [--drawings docs/evaluation]

For the paper's machine (8 TITAN RTX, its space, its systems' conventions, "8 GB" meaning 8 GiB), and for a measured
cluster where one is given. Writes an SVG a plan, and all of them in short to benchmarks/results/paper_plans.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from drawing import draw_plan
from galvatron.core.errors import GalvatronError
from galvatron.core.units import parse_bytes
from galvatron.families import load_cluster
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.setup import Setup, request_for
from systems import Setting, choose, described, system_named
from workloads import full

__all__ = ["DRAWINGS", "MODELS", "RESULTS", "Drawn"]

_ROOT = Path(__file__).parent.parent.parent
DRAWINGS = _ROOT / "docs" / "evaluation"
RESULTS = _ROOT / "benchmarks" / "results" / "paper_plans.json"
MODELS = ("bert-huge-32", "swin-huge-32")
_BUDGETS = {"paper": ("8GiB", "12GiB"), "measured": ("8GB", "12GB")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A plan that was drawn."""

    model: str
    budget: str
    cluster: str
    """``paper``, or ``measured``."""
    batch: int
    micro_batches: int
    samples_per_s: float
    """Predicted."""
    plan: tuple[str, ...]
    drawing: str
    """Name of the SVG file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a measured cluster, to draw its plans too")
    parser.add_argument("--profiles", type=Path, help="folder with the measured layers of each model, MODEL.toml")
    parser.add_argument("--drawings", type=Path, default=DRAWINGS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.drawings.mkdir(parents=True, exist_ok=True)
    drawn = []
    for model in MODELS:
        for budget in _BUDGETS["paper"]:
            plan = make_plan(request_for(model, "titan-rtx-8", Setup(memory=budget, paper=True)))
            drawn.append(_draw(plan, model, budget, "paper", given.drawings))
        if given.cluster is not None:
            for budget in _BUDGETS["measured"]:
                setting = Setting(
                    workload=full(model, given.profiles),
                    cluster=load_cluster(given.cluster),
                    budget_bytes=parse_bytes(budget),
                    max_batch=512,
                )
                plan = choose(setting, system_named("galvatron")).plan
                drawn.append(_draw(plan, model, budget, "measured", given.drawings))
    given.output.write_text(json.dumps([asdict(one) for one in drawn], indent=1, ensure_ascii=False) + "\n", "utf-8")


def _draw(plan: Plan, model: str, budget: str, cluster: str, folder: Path) -> Drawn:
    name = f"plan-{model}-{budget}-{cluster}.svg"
    where = "the paper's machine" if cluster == "paper" else plan.cluster.facts.device.name
    title = (
        f"{model}, {budget}, {where}: batch {plan.batch} in {plan.micro_batches}, "
        f"{plan.throughput:.2f} samples/s predicted"
    )
    (folder / name).write_text(draw_plan(plan, title), encoding="utf-8")
    print(title, *described(plan), sep="\n  ")
    return Drawn(
        model=model,
        budget=budget,
        cluster=cluster,
        batch=plan.batch,
        micro_batches=plan.micro_batches,
        samples_per_s=round(plan.throughput, 4),
        plan=described(plan),
        drawing=name,
    )


if __name__ == "__main__":
    try:
        main()
    except GalvatronError as error:
        sys.exit(f"error: {error}")
