"""The paper's main table, run for real: its models under eight systems and ours, each at its own best batch.

    python benchmarks/paper/main_table.py --cluster cluster.toml --profiles folder [--models …] [--budgets 8GB,…]
    python benchmarks/paper/main_table.py --cluster … --profiles … --models … --budgets … --repeat       those once more
    python benchmarks/paper/main_table.py --tiny       everything in small, on CPU processes: shows that it works
    python benchmarks/paper/main_table.py --tiny --gpu --budgets 2GB                 or on virtual GPUs

On a machine with a GPU, 8 virtual GPUs share it (CUDA MPS, NCCL over loopback sockets), each held to the budget. Goes
through the cells (model, budget, system) in order, leaves out those that the results file has, appends a line for each
run, and starts none that there is too little time for: call it again to go on. What the batch of a system is comes from
the planner, held to the system's space. Where that batch runs out of memory the next smaller one is tried, and where
the planner says that nothing fits, the smallest batch is run all the same. A plan that two systems of a column share is
run once. A repeated cell is run in new processes with the batch that it had; iterations of one plan in one boot of the
machine are taken together.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cells import BATCH_STEP, RESULTS, Cell, Run, append, batch_to_try, deciding, read_runs, settled
from fresh_ranks import FreshRanks
from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import Cluster
from galvatron.core.units import parse_bytes
from galvatron.families import load_cluster
from galvatron.planner.plan.plan import Plan
from galvatron.processes.cores import machine  # its boot: speeds differ between them
from rank_job import Measured, MeasureJob
from systems import SYSTEMS, Choice, Setting, System, choose, described, system_named, without_slowdown
from workloads import MODELS, full, tiny, tiny_cluster

_TIMED_S = 12.0
"""What the timed iterations of a run may take."""
_START_S = 15.0
"""What ranks take to start and to build their model, at most as a rule."""
_LARGEST_BATCH = {"tiny": 32, "full": 512}


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is asked for."""

    cluster: Cluster
    profiles: Path | None
    tiny: bool

    def setting(self, cell: Cell) -> Setting:
        return Setting(
            workload=tiny(cell.model) if self.tiny else full(cell.model, self.profiles),
            cluster=self.cluster,
            budget_bytes=parse_bytes(cell.budget, where="budgets"),
            max_batch=_LARGEST_BATCH["tiny" if self.tiny else "full"],
        )


def main(arguments: list[str] | None = None) -> None:
    given = _arguments(arguments)
    end = time.monotonic() + given.seconds
    table = Table(cluster=_cluster(given), profiles=given.profiles, tiny=given.tiny)
    cells = [
        Cell(model=model, budget=budget, system=system_named(system).name)
        for model in given.models.split(",")
        for budget in given.budgets.split(",")
        for system in given.systems.split(",")
    ]
    known = read_runs(given.results)
    if given.repeat:
        open_cells = [cell for cell in cells if _can_repeat(cell, deciding(known).get(cell))]
    else:
        open_cells = [cell for cell in cells if not settled(cell, known)]
        print(f"{len(cells) - len(open_cells)} of {len(cells)} cells are in {given.results}", flush=True)
    if not open_cells:
        return
    for cell in open_cells:  # what is wrong with names and files shows before any rank is started
        table.setting(cell)
    broken: set[tuple[str, str]] = set()
    with FreshRanks(table.cluster.devices, gpu=given.gpu or not given.tiny) as ranks:
        for cell in open_cells:
            if (cell.model, cell.system) in broken:
                print(f"{cell}: left out, because this system failed with this model before", flush=True)
                continue
            last = None
            try:
                runs = _again if given.repeat else _runs
                for last in runs(cell, table, ranks, given.results, given.limit, end):
                    append(given.results, last)
                    print(_line(last), flush=True)
            except InvalidInput as error:
                print(f"{cell}: {error}", flush=True)
                continue
            if last is None or (last.status == "oom" and last.batch > BATCH_STEP and not given.repeat):
                print(f"too little time is left for {cell}; call again to go on", flush=True)
                return
            if last.status == "failed" and not given.repeat:
                broken.add((cell.model, cell.system))


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default=None, help="memory of each GPU (default: 8GB,12GB,16GB)")
    parser.add_argument("--systems", default=",".join(system.name for system in SYSTEMS))
    parser.add_argument("--repeat", action="store_true", help="run cells once more that went well")
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole call")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a run has failed")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.name} beside the committed results")
    parser.add_argument("--cluster", help="the measured cluster: galvatron profile cluster --virtual 8 -o FILE")
    parser.add_argument("--profiles", type=Path, help="folder with the measured layers of each model, MODEL.toml")
    parser.add_argument("--tiny", action="store_true", help="tiny models on 4 CPU processes")
    parser.add_argument("--gpu", action="store_true", help="with --tiny: on 4 virtual GPUs")
    given = parser.parse_args(arguments)
    if given.budgets is None:
        given.budgets = "6MB,10MB" if given.tiny else "8GB,12GB,16GB"
    if given.results is None:  # what tiny models do is no result
        given.results = Path(tempfile.gettempdir()) / "galvatron-paper-tiny.jsonl" if given.tiny else RESULTS
    return given


def _cluster(given: argparse.Namespace) -> Cluster:
    if given.tiny:
        return tiny_cluster(4)
    if given.cluster is None:
        raise InvalidInput(
            "cluster: none given; expected the file that galvatron profile cluster --virtual 8 --output writes, or "
            "--tiny to try everything on CPU processes"
        )
    return load_cluster(given.cluster)


def _runs(cell: Cell, table: Table, ranks: FreshRanks, results: Path, limit_s: float, end: float) -> Iterator[Run]:
    """The runs that settle a cell, as far as there is time."""
    system, setting = system_named(cell.system), table.setting(cell)
    batch = batch_to_try(cell, read_runs(results))
    while True:
        choice = choose(setting, system, batch)
        left_s = end - time.monotonic()
        if left_s < min(limit_s, _START_S + min(_TIMED_S, 5 * choice.plan.iteration_s)):
            return
        run = _unmeasured(cell, system, setting, choice)
        twin = _twin(run, read_runs(results))
        if twin is not None:
            run = replace(twin, system=run.system, said_to_fit=run.said_to_fit, same_as=twin.same_as or twin.system)
        else:
            run = _measured(run, choice.plan, ranks, min(limit_s, left_s))
        if run.status == "failed" and left_s < limit_s:
            return  # it was not given all of its time
        yield run
        if run.status != "oom" or run.batch <= BATCH_STEP:
            return
        batch = run.batch - BATCH_STEP


def _can_repeat(cell: Cell, before: Run | None) -> bool:
    if before is not None and before.status == "ok" and not before.same_as:
        return True
    reason = (
        f"its plan is that of {before.same_as}"
        if before is not None and before.same_as
        else "it has not run, or not well"
    )
    print(f"{cell}: not repeated, {reason}", flush=True)
    return False


def _again(cell: Cell, table: Table, ranks: FreshRanks, results: Path, limit_s: float, end: float) -> Iterator[Run]:
    """One more run of the batch that the cell was settled with. It is kept if it fails, too, but does not count."""
    before = deciding(read_runs(results))[cell]
    left_s = end - time.monotonic()
    if left_s < min(limit_s, _START_S + min(_TIMED_S, 5 * before.iteration_s)):
        return
    system, setting = system_named(cell.system), table.setting(cell)
    choice = choose(setting, system, before.batch)
    run = _measured(_unmeasured(cell, system, setting, choice), choice.plan, ranks, min(limit_s, left_s))
    same = run.program_run == before.program_run and run.facts["boot"] == before.facts.get("boot")
    if run.status == "ok" and same:
        run = replace(
            run,
            iterations_s=before.iterations_s + run.iterations_s,
            peak_bytes=tuple(map(max, before.peak_bytes, run.peak_bytes)),
            allocator_bytes=tuple(map(max, before.allocator_bytes, run.allocator_bytes)),
        )
    yield run


def _unmeasured(cell: Cell, system: System, setting: Setting, choice: Choice) -> Run:
    plan, profile = choice.plan, setting.workload.profile
    return Run(
        model=cell.model,
        budget=cell.budget,
        system=cell.system,
        program=system.program(setting.workload.family),
        batch=plan.batch,
        micro_batches=plan.micro_batches,
        schedule=plan.schedule,
        said_to_fit=choice.fits,
        predicted_s=plan.iteration_s,
        predicted_without_slowdown_s=without_slowdown(setting, system, plan),
        predicted_bytes=plan.memory_bytes - setting.cluster.reserved_bytes,
        reserved_bytes=setting.cluster.reserved_bytes,
        status="failed",
        plan=described(plan),
        facts={
            "torch": version("torch"),
            "transformers": version("transformers"),
            "device": setting.cluster.device.name,
            "devices": setting.cluster.devices,
            "cluster": setting.cluster.digest,
            "profile": None if profile is None else profile.digest,
            "boot": machine(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def _twin(run: Run, runs: Iterable[Run]) -> Run | None:
    """The last run that did the same, in our runtime and in this boot."""
    known = [one for one in runs if one.status != "failed" and one.facts.get("boot") == run.facts["boot"]]
    same = (one for one in reversed(known) if run.program == "galvatron" and one.program_run == run.program_run)
    return next(same, None)


def _measured(run: Run, plan: Plan, ranks: FreshRanks, limit_s: float) -> Run:
    job = MeasureJob(system=run.system, program=run.program, plan=plan, timed_s=_TIMED_S)
    outcome = ranks.run(job, limit_s)
    found: tuple[Measured, ...] = outcome.results
    return replace(
        run,
        status=outcome.status,
        message=outcome.message,
        iterations_s=tuple(max(times) for times in zip(*(one.iterations_s for one in found), strict=True)),
        peak_bytes=tuple(one.peak_bytes for one in found),
        allocator_bytes=tuple(one.allocator_bytes for one in found),
        shortages=tuple(one.shortages for one in found),
        facts={**run.facts, "device": found[0].device} if found else run.facts,
    )


def _line(run: Run) -> str:
    same = f", as {run.same_as}" if run.same_as else ""
    told = f"{run.cell} ({run.program}{same}), batch {run.batch} in {run.micro_batches}: "
    fits = "" if run.said_to_fit else "; said not to fit"
    if run.status != "ok":
        return f"{told}{run.status}{fits}: {run.message}"
    return (
        f"{told}{run.samples_per_s:.2f} samples/s, {run.iteration_s:.3f} s (predicted {run.predicted_s:.3f}), "
        f"{max(run.peak_bytes) / 1e9:.3f} GB (predicted {run.predicted_bytes / 1e9:.3f}){fits}"
    )


if __name__ == "__main__":
    try:
        main()
    except GalvatronError as error:
        sys.exit(f"error: {error}")
