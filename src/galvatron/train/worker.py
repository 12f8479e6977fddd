"""What runs on each rank of ``galvatron train``: started by the launcher, or by torchrun on several machines."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from galvatron.core.errors import GalvatronError, NonFinite, OutOfMemory, Unequal
from galvatron.core.units import format_bytes
from galvatron.planner.plan.plan import Plan
from galvatron.processes.environment import settle
from galvatron.processes.failures import is_symptom, report_failures
from galvatron.processes.parents import outlive_parent
from galvatron.processes.stopping import Agreement, StopRequest
from galvatron.processes.virtual import virtual_devices
from galvatron.processes.watch import Watch, Watched
from galvatron.processes.world import join, own_device
from galvatron.runtime.checks import check_world
from galvatron.runtime.parallelize import parallelize
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.companions import keep_companions
from galvatron.train.data.loader import Loader, Position
from galvatron.train.inputs import open_run_data
from galvatron.train.loop import Loop, Outcome
from galvatron.train.meters import IterationTimes, PeakMemory, used_bytes
from galvatron.train.metrics import open_sinks, read_metrics
from galvatron.train.phases import Phases
from galvatron.train.progress import Display, say
from galvatron.train.report import Report, phases_line, report_view
from galvatron.train.report_page import report_page
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings
from galvatron.train.traces import write_both_traces

__all__ = ["train_rank"]

_SAID = frozenset({"weight_decay", "betas", "momentum"})
"""Of an optimizer's groups: what settings say, of a run that goes on too; the learning rate follows from the step."""
_CUT_OFF_S = 15.0
"""How long a rank that lost its connections waits to be told whose fault that is."""


def train_rank(path: Path) -> None:
    """Train this rank's share of the run in this folder, from its newest checkpoint if there is one."""
    folder = RunFolder(path)
    # Of virtual GPUs the launcher has written the plan; under torchrun it is there when all have joined.
    join(in_turn=virtual_devices() is not None and len(folder.load()[0].stages) == 1)
    outlive_parent()  # ranks that have met watch each other, and end in order
    stop = StopRequest()  # until all have met there is nothing to save, and signals end the process
    report_failures()
    plan, settings = folder.load()
    check_world(plan, dist.get_world_size())
    device, rank = own_device(), dist.get_rank()
    watch = Watch(
        Watched(rank=rank, stages=_stages(plan), memory_bytes=lambda: used_bytes(device)),
        store=_own_connection(),
        stop=stop,
        timeout_s=settings.timeout_s,
        record=folder.write_failure,
    )
    watch.start()
    loop: Loop | None = None
    try:
        loop = _prepared(folder, plan, settings, device, stop, watch)
        settle()
        outcome = loop.run()
        _finish(folder, plan, loop, outcome)
    except BaseException as error:
        if isinstance(error, Unequal) and rank == 0:
            folder.write_failure({"message": str(error), "step": 0 if loop is None else loop.step})
        raise _said_to_all(error, plan, watch, rank, 0 if loop is None else loop.step + 1) from error
    watch.done()
    dist.destroy_process_group()


def _own_connection() -> Any:
    """To the store through which the ranks met; the main thread may wait in the other one."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _stages(plan: Plan) -> list[int]:
    return [number for number, stage in enumerate(plan.stages) for _ in stage.devices]


def _prepared(
    folder: RunFolder, plan: Plan, settings: Settings, device: torch.device, stop: StopRequest, watch: Watch
) -> Loop:
    assert plan.model.config is not None
    phases = _phases(folder, settings)
    with phases.phase("opening data"):
        data = open_run_data(settings, plan.model.config, plan.model.training, folder)
    if dist.get_rank() == 0:
        model_folder = None if settings.weights is None else Path(settings.weights)
        keep_companions(folder.companions, tokenizer=data.tokenizer, model=model_folder)
    memory = PeakMemory(device)
    with phases.phase("building", "building the model"):
        model = parallelize(
            None,
            plan,
            weights=settings.weights,
            adapters=settings.adapters,
            documents=data.documents,
            label_smoothing=settings.label_smoothing,
            seed=settings.seed,
            device=device,
        )
    optimizer = model.optimizer(
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        decay_vectors=False,
        **settings.optimizer_options(plan.model.training.optimizer),
    )
    memory.phase_done("building")
    checkpoints = Checkpoints(folder.checkpoints, keep=settings.keep)
    step, start = 0, None
    if checkpoints.latest() is not None:
        said = [{name: value for name, value in group.items() if name in _SAID} for group in optimizer.param_groups]
        with phases.phase("loading", "loading the checkpoint"):
            loaded = checkpoints.load(model, optimizer)
        for group, own in zip(optimizer.param_groups, said, strict=True):
            group.update(own)
        step, start = loaded.step, Position.from_json(loaded.progress.get("data"))
        memory.phase_done("loading")
    loader = Loader(
        data.train,
        batch=plan.batch,
        seed=settings.seed,
        workers=int(device.type == "cuda") if settings.workers is None else settings.workers,
        start=start,
        reads=model.rows_read(),
    )
    first = model.rank == 0
    return Loop(
        folder=folder,
        settings=settings,
        model=model,
        optimizer=optimizer,
        loader=loader,
        held_out=data.held_out,
        checkpoints=checkpoints,
        watch=watch,
        stop=stop,
        agreement=Agreement(),
        times=IterationTimes(model),
        memory=memory,
        sinks=open_sinks(folder.path, folder.metrics_file, settings, after_step=step) if first else [],
        display=Display(settings.steps, step) if first else None,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else plan.cluster.facts.device.name,
        phases=phases,
        step=step,
    )


def _phases(folder: RunFolder, settings: Settings) -> Phases:
    """Rank 0 says what takes long; what was before is in the run's folder."""
    phases = Phases(say if dist.get_rank() == 0 else None)
    started = folder.read_start()
    if started is not None:
        at, before = started
        for name, seconds in before.items():
            phases.add(name, seconds)
        phases.add("starting", max(0.0, time.time() - at))
    return phases


def _finish(folder: RunFolder, plan: Plan, loop: Loop, outcome: Outcome) -> None:
    """Close what is open, and say how it went."""
    loop.loader.close()
    ranks = loop.times.of_all_ranks(loop.memory, loop.agreement)
    disturbed = loop.times.disturbed(loop.agreement)
    if loop.display is None:
        return
    for sink in loop.sinks:
        sink.close()
    loop.display.close()
    folder.write_outcome(outcome.step, stopped=outcome.stopped)
    write_both_traces(folder, plan)
    if outcome.stopped:
        loop.display.say(f"stopped after step {outcome.step}, which is saved; go on with --resume")
    iteration_s = loop.times.iteration_s
    if iteration_s is None or not outcome.losses:
        loop.display.say(phases_line(loop.phases.seconds))
        return
    report = Report.of(plan, ranks, iteration_s, outcome.losses, len(outcome.losses))
    report = replace(report, phases=loop.phases.seconds, disturbed=disturbed)
    folder.report_file.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    report_page(plan, report, read_metrics(folder.metrics_file)).save(folder.report_page_file)
    loop.display.view(report_view(plan, report))


# When something goes wrong


def _said_to_all(error: BaseException, plan: Plan, watch: Watch, rank: int, step: int) -> BaseException:
    """Let the other ranks know, and give the error its final words."""
    if is_symptom(error) and not isinstance(error, GalvatronError):
        watch.wait_for_the_end(_CUT_OFF_S)  # whoever finds the cause ends this process
    if _is_out_of_memory(error):
        error = OutOfMemory(_out_of_memory(error, plan, watch, rank, step))
    if isinstance(error, NonFinite | Unequal):  # which every rank finds at the same step
        watch.done()
        return error
    stage = _stages(plan)[rank]
    said = str(error) if isinstance(error, GalvatronError) else f"{type(error).__name__}: {error}"
    watch.fail(f"rank {rank} (stage {stage}, step {step}): {said}", step)
    return error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _out_of_memory(error: BaseException, plan: Plan, watch: Watch, rank: int, step: int) -> str:
    """What was predicted and what is used, stage by stage, as far as the ranks have said."""
    own = _stages(plan)[rank]
    lines = [f"rank {rank} (stage {own}) ran out of memory at step {step}: {str(error).splitlines()[0]}"]
    heartbeats = watch.heartbeats()
    for number, stage in enumerate(plan.stages):
        used = max((heartbeat.memory_bytes for heartbeat in heartbeats if heartbeat.stage == number), default=None)
        lines.append(
            f"  stage {number}: predicted {format_bytes(stage.memory_bytes)} (of it "
            f"{format_bytes(stage.memory.reserved)} besides tensors), "
            + ("nothing heard" if used is None else f"used {format_bytes(used)}")
            + f", budget {format_bytes(plan.memory_budget_bytes)}"
        )
    lines.append("  plan for a smaller budget (--memory) or batch (--batch), or leave the devices to this run alone")
    return "\n".join(lines)
