"""From what a user asks for to a run: detect the devices, profile, plan, launch, and go on after failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from galvatron.core.errors import GalvatronError, Infeasible, InvalidInput, RankFailure
from galvatron.core.spec import ModelSpec, Training
from galvatron.measure.auto import AUTO, request_here
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.setup import request_for, training_of, with_adapters
from galvatron.processes.job import Progress
from galvatron.processes.virtual import check_virtual, virtual_devices, virtual_gpus
from galvatron.train.agreement import check_said
from galvatron.train.checkpoints.folder import complete
from galvatron.train.metrics import check_sinks
from galvatron.train.phases import Phases
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings

__all__ = ["Asked", "Screen", "is_plan", "replanned", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A run as it is asked for."""

    source: str | None
    """A model or a plan file; None: that of the run to go on with."""
    out: Path
    settings: Settings
    setup: Setup
    devices: int | None = None
    """None: all GPUs, or as many processes as there are CPU cores."""
    virtual: int | None = None
    """As many devices, on one GPU."""
    cluster: str = AUTO
    """:data:`AUTO`: profile this machine."""
    fresh: bool = False
    """Measure again, whatever was measured before."""
    resume: bool = False
    max_restarts: int = 0
    replan: bool = False
    config: str = ""
    """All of this as a file that the command line reads, to repeat the run."""

    @property
    def said_cluster(self) -> str | None:
        return None if self.cluster == AUTO else self.cluster


def is_plan(source: str) -> bool:
    """Whether a file is a plan (and not, say, a model's ``config.json``)."""
    path = Path(source)
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True  # whatever reads plans will say what is wrong with it
    return isinstance(content, dict) and "stages" in content


def _given_plan(asked: Asked) -> Plan | None:
    return Plan.load(asked.source) if asked.source is not None and is_plan(asked.source) else None


@dataclass(frozen=True, slots=True)
class Screen:
    """What people are shown on the way."""

    plan: Callable[[Plan], None]
    """A plan, before it runs."""
    say: Callable[[str], None]
    measuring: Callable[[str], AbstractContextManager[Progress]]
    """Progress while something is measured."""


def train(asked: Asked, screen: Screen) -> None:
    """Train; returns when all steps are done or the run was stopped in order."""
    folder = RunFolder(asked.out)
    check_sinks(asked.settings)
    if "RANK" in os.environ and asked.virtual is None:
        _as_rank(asked, folder)
        return
    (folder.check_started if asked.resume else folder.check_new)()
    if asked.resume and _is_finished(asked, folder, screen):
        return
    phases = Phases(screen.say)
    with virtual_gpus(asked.virtual):
        with phases.phase("checking", "checking data and weights"):
            _check_paths(asked.settings)
            asked = _with_adapters(asked)
            samples = _check_inputs(_subject(asked, folder), asked.settings, folder)
        plan = _first_plan(asked, folder, screen, phases)
        asked = replace(asked, settings=asked.settings.with_steps(samples, plan.batch))
        if asked.resume and _is_finished(asked, folder, screen):
            return
        screen.plan(plan)
        _check_devices(plan.cluster.devices)
        _check_precision(plan)
        folder.begin(plan, asked.settings)
        if not asked.resume:
            folder.config_file.write_text(asked.config, encoding="utf-8")
        _run(asked, folder, plan, screen, phases)


def _is_finished(asked: Asked, folder: RunFolder, screen: Screen) -> bool:
    """Whether nothing is left to do, which is said at once."""
    saved, steps = complete(folder.checkpoints), asked.settings.steps
    if not saved or saved[-1].step < steps or asked.settings.epochs is not None:
        return False
    screen.say(
        f"the run in {folder.path} is finished: all {steps} steps are done and saved; train longer with --steps, or "
        f"galvatron export {folder.path} OUT"
    )
    return True


def _run(asked: Asked, folder: RunFolder, plan: Plan, screen: Screen, phases: Phases) -> None:
    from galvatron.train.launch import launch  # torch takes seconds

    for left in range(asked.max_restarts, -1, -1):
        folder.write_start(phases.seconds)
        ended = launch(folder, plan.cluster.devices, screen.say)
        if not ended.status:
            return
        if not ended.may_try_again or not left:
            raise _Failed(ended.message, ended.status)
        screen.say(f"error: {ended.message}")
        if asked.replan:
            remaining = _devices_left(plan.cluster.devices, len(ended.ranks))
            if remaining < plan.cluster.devices:
                plan = replanned(asked, plan, remaining)
                screen.plan(plan)
                folder.begin(plan, asked.settings)
        folder.forget_endings()
        screen.say(
            f"starting again from the last checkpoint on {plan.cluster.devices} devices ({left - 1} restarts left)"
        )


class _Failed(GalvatronError):
    """A failed run ends with the status of what failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = status


def _as_rank(asked: Asked, folder: RunFolder) -> None:
    """Under torchrun this process is one of the ranks; the plan must be there, because planning needs all of them."""
    from galvatron.train.worker import train_rank

    if not asked.resume and _given_plan(asked) is None:
        raise InvalidInput(
            f"under torchrun a plan is needed, but {asked.source!r} given; make one first: torchrun … -m galvatron "
            "profile cluster -o cluster.toml, then galvatron plan … --cluster cluster.toml -o plan.json"
        )
    if os.environ["RANK"] == "0":  # the others read what it writes when all have joined
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        if restarted and folder.launch == _launch():  # what was asked for is written down
            folder.forget_endings()
        else:
            _begin_as_rank(asked, folder)
    train_rank(folder.path)


def _begin_as_rank(asked: Asked, folder: RunFolder) -> None:
    """Write down what the ranks are about to do."""
    (folder.check_started if asked.resume else folder.check_new)()
    run = Plan.load(folder.plan_file) if asked.resume else None
    plan = _given_plan(asked) or run
    assert plan is not None
    _check_runnable(plan)
    _check_agreed(asked, plan, goes_on_with=run)
    settings = asked.settings
    if settings.epochs is not None:
        settings = settings.with_steps(_check_inputs(_subject(asked, folder), settings, folder), plan.batch)
    folder.begin(plan, settings)
    folder.launch_file.write_text(_launch(), encoding="utf-8")
    if not asked.resume:
        folder.config_file.write_text(asked.config, encoding="utf-8")


def _launch() -> str:
    """What torchrun calls this start of all its processes, restarts included."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


# Plans


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is to be trained, known before anything is measured."""

    config: Mapping[str, Any]
    training: Training
    generic: bool


def _subject(asked: Asked, folder: RunFolder) -> _Subject:
    """Of the plan, where there is one, or of the model."""
    given = _given_plan(asked)
    if asked.resume or given is not None:
        plan = given or Plan.load(folder.plan_file)
        _check_runnable(plan)
        assert plan.model.config is not None
        return _Subject(plan.model.config, plan.model.training, plan.model.family == "generic")
    if asked.source is None:
        raise InvalidInput("model: none given; name a model or a plan file, or go on with a run (--resume)")
    spec = load_any_model(asked.source, training_of(asked.setup))
    if spec.config is None:
        raise InvalidInput(
            f"model {spec.name!r}: is described by figures alone, so it can be planned but not trained; give a preset, "
            "or a Hugging Face configuration or folder"
        )
    return _Subject(spec.config, spec.training, spec.family == "generic")


def _first_plan(asked: Asked, folder: RunFolder, screen: Screen, phases: Phases) -> Plan:
    if asked.resume:
        plan = Plan.load(folder.plan_file)
        given = _given_plan(asked)
        if given is not None:
            return _check_agreed(asked, given, goes_on_with=plan)
        wanted = asked.devices or (_devices_here() if asked.replan else plan.cluster.devices)
        if wanted == plan.cluster.devices:
            return _check_agreed(asked, plan)
        if wanted < plan.cluster.devices:
            return replanned(asked, plan, wanted)
        return _planned(asked, plan.model.spec(), {**asked.setup, "batch": plan.batch}, wanted, screen, phases)
    assert asked.source is not None
    given = _given_plan(asked)
    if given is not None:
        plan = given
        if asked.devices not in (None, plan.cluster.devices):
            raise InvalidInput(
                f"devices: {asked.devices} given, but the plan is for {plan.cluster.devices}; plan anew for that many"
            )
        return _check_agreed(asked, plan)
    return _planned(asked, asked.source, asked.setup, asked.devices or _devices_here(), screen, phases)


def _check_agreed(asked: Asked, plan: Plan, *, goes_on_with: Plan | None = None) -> Plan:
    """The plan, if what else is said agrees with it, and it is for the model of the run that it goes on with."""
    check_said(asked.setup, plan, cluster=asked.said_cluster)
    if goes_on_with is not None:
        from galvatron.train.inputs import check_same_model

        check_same_model(plan, goes_on_with)
    return plan


def _planned(asked: Asked, model: str | ModelSpec, setup: Setup, devices: int, screen: Screen, phases: Phases) -> Plan:
    """The best plan for this machine, from measured figures unless a cluster is given."""
    if asked.cluster != AUTO:
        request = request_for(model, asked.cluster, setup, load_any_model)
        if asked.devices not in (None, request.cluster.devices):
            raise InvalidInput(
                f"devices: {asked.devices} given, but cluster {asked.cluster!r} has {request.cluster.devices}; leave "
                "one of the two out"
            )
    else:
        with phases.phase("measuring", silent=True):  # which shows how far it has come
            request = request_here(model, setup, devices=devices, measuring=screen.measuring, fresh=asked.fresh)
    with phases.phase("planning"):
        return make_plan(request)


def replanned(asked: Asked, plan: Plan, devices: int) -> Plan:
    """For fewer devices, from the figures the plan was made with: the same model and batch, so that training goes on as
    it was. If so many devices cannot be used, the next smaller number that can."""
    setup: Setup = {**asked.setup, "batch": plan.batch, "compile": plan.model.training.compile}
    for count in range(devices, 0, -1):
        request = request_for(plan.model.spec(), plan.cluster.facts.shrunk(count), setup)
        try:
            return make_plan(replace(request, profile=plan.profile))
        except Infeasible as error:
            reason = error
    raise RankFailure(f"no plan for the {devices} devices that are left: {reason}")


def _check_runnable(plan: Plan) -> None:
    if plan.model.config is None:
        raise InvalidInput(
            f"model.config: null in this plan, because {plan.model.name!r} was described by figures alone; plan a "
            "model from a preset or a Hugging Face configuration"
        )


def _check_paths(settings: Settings) -> None:
    """Find out before anything is measured whether data and weights are there."""
    from galvatron.train.data.opening import check_paths  # torch takes seconds

    if settings.weights is not None and not Path(settings.weights).is_dir():
        raise InvalidInput(f"weights: {settings.weights!r} is no folder; give one with config.json and safetensors")
    check_paths((settings.data, settings.evaluation_data), settings.tokenizer)


def _with_adapters(asked: Asked) -> Asked:
    """Adapters to start from say their own rank and projections."""
    if asked.settings.adapters is None or asked.setup.get("lora") is not None or asked.resume:
        return asked
    from galvatron.families.adapter_weights import adapter_lora

    lora = adapter_lora(Path(asked.settings.adapters))
    plan = _given_plan(asked)
    planned = None if plan is None else plan.model.training.lora
    if planned is not None and replace(lora, targets=planned.targets, full=planned.full) == planned:
        lora = planned  # peft lists the projections that a plan has by a pattern; names are compared when they are read
    return replace(asked, setup=with_adapters(asked.setup, lora))


def _check_inputs(subject: _Subject, settings: Settings, folder: RunFolder) -> int:
    """Find out before anything is measured whether data and weights fit the model; text is tokenized here, once.
    Returns how many samples there are."""
    from galvatron.train.inputs import check_position, check_weights, open_run_data

    data = open_run_data(settings, subject.config, subject.training, folder)
    check_position(data, settings.seed, folder)
    if settings.weights is not None and not complete(folder.checkpoints):
        check_weights(settings.weights, subject.config, subject.training, generic=subject.generic)
    return len(data.train)


# Devices


def _check_devices(wanted: int) -> None:
    """Refuse a plan for more GPUs than there are; so many CPU processes there always are."""
    import torch  # takes seconds, but the data that are looked at next need it too

    check_virtual(wanted)
    gpus = torch.cuda.device_count()
    if virtual_devices() is None and 0 < gpus < wanted:
        raise InvalidInput(
            f"devices: the plan is for {wanted}, but this machine has {gpus} GPU{'s' * (gpus > 1)}; plan anew for that "
            f"many (--devices {gpus}), or let {wanted} ranks share the first one (--virtual {wanted})"
        )


def _check_precision(plan: Plan) -> None:
    """Refuse TF32 where there is no GPU, and float8 without torchao; what a GPU has, ranks find out, because CUDA must
    not be used here."""
    import torch

    from galvatron.runtime.checks import uses
    from galvatron.runtime.float8 import check_float8
    from galvatron.runtime.products import check_tf32

    if not torch.cuda.device_count():
        check_tf32(plan.model.training.precision, torch.device("cpu"))
    if uses(plan, "float8"):
        check_float8(torch.device("cpu"))


def _devices_here() -> int:
    """GPUs, or CPU cores where there are none; asked in another process, because CUDA must not be used in this one."""
    return virtual_devices() or _gpus() or len(os.sched_getaffinity(0))


def _gpus() -> int:
    """Those that answer."""
    script = (
        "import torch\n"
        "good = 0\n"
        "for index in range(torch.cuda.device_count()):\n"
        "    try:\n"
        "        torch.ones(1, device=f'cuda:{index}').item()\n"
        "        good += 1\n"
        "    except RuntimeError:\n"
        "        pass\n"
        "print(good)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def _devices_left(devices: int, failed: int) -> int:
    """GPUs that still answer; among CPU processes and virtual GPUs those that did not fail."""
    gpus = 0 if virtual_devices() is not None else _gpus()
    return min(devices, gpus or devices - failed)
