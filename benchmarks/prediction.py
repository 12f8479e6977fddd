"""Do predictions hold? Profiles this machine and a BERT, then runs plans and compares.

    python benchmarks/prediction.py [--devices 4] [--rounds 3] [--steps 3] [--output results.jsonl]
    python benchmarks/prediction.py --virtual 8 [--rounds 1] [--steps 4]          # on one GPU: a cut of BERT-Huge, fp32

The plans cover every kind of parallelism, written by hand, and the planner's own best. Each round builds and runs every
plan, so that a slow moment of the machine falls on all of them. On CPUs that others use too, the time they took is left
out (T·(1 − their part of the cores)); the plain wall clock is in the results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from galvatron.core.errors import GalvatronError
from galvatron.core.files.clusters import dump_cluster
from galvatron.core.files.profiles import dump_profile
from galvatron.core.spec import GPIPE, ONE_F_ONE_B, Precision, Schedule, Training
from galvatron.families import load_model
from galvatron.measure.clusters import profile_cluster
from galvatron.measure.layers import profile_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.space import EXTENDED
from galvatron.processes.helper import measured
from galvatron.processes.virtual import virtual_gpus
from prediction_runs import PlanJob, Run, run_on_gpus
from sizes import Size

SMALL = Size(hidden=256, layers=4, heads=8, length=32, batch=16, vocabulary=2000)
HUGE = Size(hidden=1280, layers=8, heads=16, length=512, batch=16)


def plans_for(request: Request, size: Size) -> dict[str, Plan]:
    """Plans of every kind for so many devices."""
    n, layers = request.cluster.devices, size.layers + 2
    half, quarter = n // 2, size.layers // 4
    mixed = [f"dp{n}", f"sdp{n}", f"dp{half}-tp2", f"dp{half}-tp2+rc"]

    def flat(strategy: str, micro_batches: int = 1) -> Plan:
        return priced(request, [[strategy] * layers], micro_batches=micro_batches)

    def piped(strategy: str, stages: int, micro_batches: int, schedule: Schedule) -> Plan:
        sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        return priced(
            replace(request, schedule=schedule), [[strategy] * size for size in sizes], micro_batches=micro_batches
        )

    gpipe, one = GPIPE, ONE_F_ONE_B
    plans = {
        f"dp{n}": flat(f"dp{n}"),
        f"dp{n} in 2 micro-batches": flat(f"dp{n}", 2),
        f"dp{n}+rc": flat(f"dp{n}+rc"),
        f"dp{n}+zero2": flat(f"dp{n}+zero2"),
        f"sdp{n}": flat(f"sdp{n}"),
        f"dp2-sdp{half}": flat(f"dp2-sdp{half}"),
        f"tp{n}": flat(f"tp{n}"),
        f"dp{half}-tp2": flat(f"dp{half}-tp2"),
        f"tp2-sdp{half}": flat(f"tp2-sdp{half}"),
        f"tp{n}+sp": priced(request, [[f"tp{n}", *[f"tp{n}+sp"] * size.layers, f"tp{n}"]]),
        "mixed": priced(request, [[f"dp{n}", *(each for each in mixed for _ in range(quarter)), f"dp{n}"]]),
        f"2 stages of dp{half}, gpipe, 4": piped(f"dp{half}", 2, 4 if n == 4 else 2, gpipe),
        f"2 stages of tp{half}, 1f1b, 4": piped(f"tp{half}", 2, 4, one),
        f"2 stages of sdp{half}, 1f1b, 2": piped(f"sdp{half}", 2, 2, one),
        "4 stages, gpipe, 4": piped("single" if n == 4 else f"dp{n // 4}", 4, 4, gpipe),
        "4 stages, 1f1b, 8": piped("single" if n == 4 else f"dp{n // 4}", 4, 8, one),
    }
    best = try_plan(request)
    assert best is not None
    return {**plans, "the planner's own": best}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(one), ranks(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--virtual", type=int, help="so many devices on one GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cached", action="store_true", help="use profiles that were measured before")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "prediction.jsonl")
    parser.add_argument("--keep", type=Path, help="write the profiles into this folder too")
    arguments = parser.parse_args()
    size = HUGE if arguments.virtual else SMALL
    request = _profiled(arguments, size)
    plans, output = plans_for(request, size), arguments.output.absolute()
    if arguments.virtual:
        runs = run_on_gpus(plans, arguments.rounds, arguments.steps, output, _progress)
    else:
        devices = request.cluster.devices
        job = PlanJob(devices=devices, plans=plans, rounds=arguments.rounds, steps=arguments.steps, output=output)
        # The ranks import the job's module from here.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        runs = measured(job, _progress)
    _report(request.cluster.devices, plans, runs)


def _profiled(arguments: argparse.Namespace, size: Size) -> Request:
    """What is planned for: a BERT of this size on the devices at hand, both measured."""
    fresh = not arguments.cached
    model = load_model(size.config(tied=False), Training(precision=Precision.FP32, sequence_length=size.length))
    with virtual_gpus(arguments.virtual):
        cluster = profile_cluster(arguments.virtual or arguments.devices, fresh=fresh, progress=_progress)
        profile = profile_model(model, cluster, fresh=fresh, progress=_progress)
    print(cluster.source, profile.source, sep="\n")
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        (arguments.keep / "cluster.toml").write_text(dump_cluster(cluster), encoding="utf-8")
        (arguments.keep / "profile.toml").write_text(dump_profile(profile), encoding="utf-8")
    switches = replace(EXTENDED, hybrid_sharding=True)
    return Request(model=model, cluster=cluster, batch=size.batch, profile=profile, switches=switches)


def _report(devices: int, plans: dict[str, Plan], runs: dict[str, Run]) -> None:
    print(
        f"{'plan on ' + str(devices):30} {'predicted':>10} {'measured':>10} {'off':>6} {'wall':>8} {'memory off':>11}"
    )
    errors, predicted, found = [], [], []
    for name, plan in plans.items():
        run = runs[name]
        errors.append(plan.iteration_s / run.iteration_s - 1)
        predicted.append(plan.iteration_s)
        found.append(run.iteration_s)
        wall = statistics.median(one.wall_s for one in run.iterations)
        reserved = plan.cluster.facts.reserved_bytes
        memory = (plan.memory_bytes - reserved) / max(run.peaks) - 1
        times = f"{plan.iteration_s:9.3f}s {run.iteration_s:9.3f}s {errors[-1]:+6.0%} {wall:7.2f}s"
        print(f"{name:30} {times} {memory:+10.0%}")
    mean = statistics.fmean(abs(error) for error in errors)
    print(f"mean error {mean:.1%} over {len(errors)} plans, Spearman {spearman(predicted, found):.3f}")


def _progress(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what:40}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except GalvatronError as error:
        sys.exit(f"error: {error}")
