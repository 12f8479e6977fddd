"""One architecture of the intake, in a process of its own: every kind of strategy on two ranks, against one process."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import math
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

import galvatron
from galvatron.core.errors import GalvatronError
from galvatron.core.spec import Cluster, Training
from galvatron.families import load_cluster
from galvatron.families.build import without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.image_examples import takes_images
from galvatron.families.layer import Batch, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.split_trial import split_difference
from galvatron.runtime.trial import own_loss, small_images, trial_batches
from galvatron.runtime.unpriced import facts_of, unpriced
from intake_models import LENGTH, Architecture
from intake_table import COLUMNS, EQUAL, FAILED, REFUSED, WRONG

__all__ = ["Outcome", "examine"]

_RANKS, _ROWS, _STEPS = 2, 8, 3
_RATE, _EPSILON = 1e-3, 1e-4
"""A gradient that is all rounding (of a key's bias) must not become a step of Adam."""
_LOSS_TOLERANCE, _PARAMETER_TOLERANCE = 1e-4, 1e-4
_GRADIENT_TOLERANCE, _NOISE = 2e-3, 1e-5
"""Of the largest element of a gradient, and of the largest of all gradients. Adam does not see a wrong factor."""
_COLUMN_S = 90.0
_REST_S = 3.0
"""How long a rank may take to say its error after another did."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one column says."""

    outcome: str
    reason: str = ""


@dataclass(slots=True)
class _Reference:
    """What the stock model does in one process."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    first_names: dict[str, str] = field(default_factory=dict)
    """Of each name that a parameter has, the first: tied weights have several."""


def examine(architecture: Architecture) -> dict[str, Any]:
    """The architecture's row of the table."""
    started = time.monotonic()
    row: dict[str, Any] = {"architecture": architecture.name, "head": architecture.head}
    notes: dict[str, Any] = {}
    columns = {name: asdict(own) for name, own in _columns(architecture, notes).items()}
    row |= notes
    row["columns"] = {name: columns[name] for name in COLUMNS}
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def _columns(architecture: Architecture, notes: dict[str, Any]) -> dict[str, Outcome]:
    """``notes``: what else is known of the architecture."""
    found: dict[str, Any] = {}

    def prepare() -> None:
        stock = architecture.stock
        notes["model_type"] = stock.config_class.model_type
        model, training = architecture.model()
        notes["tp_plan"] = any("*" in name for name in getattr(model, "tp_plan", None) or ())  # of blocks
        notes["ep_plan"] = bool(getattr(model, "ep_plan", None))
        example = _with_images(model) if architecture.images else None
        layered = layered_model(without_weights(model), example)
        notes["layers"] = [layer.kind for layer in layered.layers]
        batches = list(trial_batches(layered, model, (_ROWS, LENGTH), example).values())
        found.update(
            model=model, training=training, layered=layered, batches=(batches * _STEPS)[:_STEPS], example=example
        )

    outcome = _tried(prepare)
    if outcome.outcome != EQUAL:
        return dict.fromkeys(COLUMNS, outcome)
    case = _Case(**found)
    columns = {"planned": _tried(case.make_plan)}
    outcome = _tried(case.train_alone)
    if outcome.outcome != EQUAL:
        outcome = Outcome(REFUSED, f"the stock model itself does not train on a trial batch: {outcome.reason}")
        return columns | dict.fromkeys(COLUMNS[1:], outcome)
    count = len(case.layered.layers)
    columns["DP"] = case.column(lambda: case.unpriced([["dp2"] * count]))
    columns["SDP"] = case.column(lambda: case.unpriced([["sdp2"] * count]))
    columns["PP"] = case.column(lambda: case.unpriced([["single"] * (count // 2), ["single"] * (count - count // 2)]))
    columns["TP"] = case.column(case.tensor_parallel)
    columns["EP"] = case.column(case.expert_parallel)
    planned = columns["planned"]
    columns["plan"] = case.column(case.chosen) if planned.outcome == EQUAL else planned
    return columns


def _with_images(model: nn.Module) -> Batch:
    if not takes_images(model):
        raise _Refused("it is no model of which batches with images can be made")
    return small_images(model, LENGTH)


class _SaidApart(Exception):
    """What another process said instead of an answer."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def _apart(work: Callable[[], Any]) -> Any:
    """The work in a process of its own: one that has run a backward pass cannot fork ranks that run others."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        made: list[Any] = []
        outcome = _tried(lambda: made.append(work()))
        there.send_bytes(pickle.dumps((outcome, made)))

    process = context.Process(target=run, daemon=True)
    process.start()
    there.close()
    try:
        outcome, made = pickle.loads(here.recv_bytes())
    except EOFError:
        outcome, made = Outcome(FAILED, "its process died"), []
    finally:
        process.join()
    if outcome.outcome != EQUAL:
        raise _SaidApart(outcome)
    return made[0]


def _tried(work: Callable[[], Any]) -> Outcome:
    """Whether it works, is refused, or fails."""
    try:
        work()
    except _SaidApart as said:
        return said.outcome
    except GalvatronError as error:
        return Outcome(REFUSED, _line(error))
    except Exception as error:
        return Outcome(FAILED, _raw(error))
    return Outcome(EQUAL)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _raw(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {place.name} ({Path(place.filename).name}:{place.lineno}): {_line(error)}"


class _Refused(GalvatronError):
    """A column that does not apply."""


@dataclass
class _Case:
    """A model, what it is given, and what it does in one process."""

    model: nn.Module
    training: Training
    layered: LayeredModel
    batches: Sequence[Batch]
    example: Batch | None = None
    """Of images beside text."""
    reference: _Reference = field(default_factory=_Reference)
    planned: Plan | None = None

    def make_plan(self) -> None:
        """What the planner makes of the model."""
        self.planned = _apart(lambda: planned(self.model, self.layered, self.batches[0], self.training))

    def chosen(self) -> Plan:
        assert self.planned is not None
        return self.planned

    def unpriced(self, stages: Sequence[Sequence[str]]) -> Plan:
        plan = unpriced(facts_of(self.layered, self.training, type(self.model).__name__), stages)
        return replace(plan, batch=_ROWS)

    def tensor_parallel(self) -> Plan:
        """Every layer that has rules is split, if the trial that decides about TP allows it; others are under DP."""
        blocks = self.layered.layers[1:-1]
        if not any(layer.rules for layer in blocks):
            why = self.layered.tensor_rules.refused if isinstance(self.layered, Generic) else ""
            raise _Refused(why or "no projections of its blocks can be split")
        kinds = {kind.name: kind for kind in facts_of(self.layered, self.training, "").kinds}
        able = [bool(layer.rules) and kinds[layer.kind].allows_tensor_parallel(_RANKS) for layer in self.layered.layers]
        if not any(able[1:-1]):
            raise _Refused("2 does not divide its heads")
        if isinstance(self.layered, Generic):
            rules = self.layered.tensor_rules
            wrong = _apart(lambda: split_difference(self.model, self.training, rules))
            if wrong is not None:
                raise _Refused(f"no tensor parallelism is offered, because {wrong}")
        return self.unpriced([["tp2" if can else "dp2" for can in able]])

    def expert_parallel(self) -> Plan:
        """Every layer with experts has them divided over both ranks."""
        layers = self.layered.layers
        if not any(layer.experts for layer in layers):
            why = self.layered.expert_rules.refused if isinstance(self.layered, Generic) else ""
            raise _Refused(why or "it has no experts")
        if any(layer.experts.count % _RANKS for layer in layers if layer.experts):
            raise _Refused("2 does not divide its experts")
        return self.unpriced([["dp2/ep2" if layer.experts else "dp2" for layer in layers]])

    def train_alone(self) -> None:
        """Three steps of the stock model with its own loss."""
        self.reference = _apart(self._alone)

    def _alone(self) -> _Reference:
        reference = _Reference()
        model: Any = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=_EPSILON)
        for step, batch in enumerate(self.batches):
            loss = own_loss(model, batch, None)
            if not math.isfinite(float(loss)):
                raise _Refused(f"its loss is {float(loss)}")
            torch.autograd.backward(loss)
            reference.losses.append(float(loss))
            if step == 0:
                named = model.named_parameters(remove_duplicate=False)
                reference.gradients = {
                    name: torch.zeros_like(own) if own.grad is None else own.grad.clone() for name, own in named
                }
            optimizer.step()
            optimizer.zero_grad()
        first = {own: name for name, own in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        reference.first_names = {name: first[own] for name, own in named}
        reference.parameters = {name: own.detach() for name, own in model.named_parameters(remove_duplicate=False)}
        return reference

    def column(self, plan: Callable[[], Plan]) -> Outcome:
        """Train under a plan on two ranks and compare."""
        made: list[Plan] = []
        outcome = _tried(lambda: made.append(plan()))
        if outcome.outcome != EQUAL:
            return outcome
        outcome = _on_ranks(lambda: self._under(made[0], check=False))
        if outcome.outcome != WRONG:
            return outcome
        # Whether a user would be told before it trains, and if not, whether it is more than rounding.
        outcome = _on_ranks(lambda: self._under(made[0], check=True))
        return self._in_fp64(made[0], outcome) if outcome.outcome == WRONG else outcome

    def _in_fp64(self, plan: Plan, outcome: Outcome) -> Outcome:
        wide = replace(self, model=copy.deepcopy(self.model).double())
        if _tried(wide.train_alone).outcome != EQUAL:
            return outcome
        again = _on_ranks(lambda: wide._under(plan, check=False, dtype=torch.float64))
        return Outcome(EQUAL, f"in fp64; in fp32 {outcome.reason}") if again.outcome == EQUAL else outcome

    def _under(self, plan: Plan, *, check: bool, dtype: torch.dtype | None = None) -> Outcome:
        """On a rank: three steps. Rank 0 says what differs."""
        parallel = galvatron.parallelize(self.model, plan, check=check, device="cpu", dtype=dtype, example=self.example)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=_RATE, eps=_EPSILON)
        losses = []
        off: str | None = None
        for step, batch in enumerate(self.batches):
            losses.append(float(parallel.forward_backward(batch)))
            if step == 0:
                off = _gradients_off(self.reference.gradients, parallel.whole_gradients())
            optimizer.step()
            optimizer.zero_grad()
        off = off or _losses_off(self.reference.losses, losses)
        parameters_off = _parameters_off(self.reference, parallel.whole_parameters())
        off = off or parameters_off
        return Outcome(EQUAL) if off is None else Outcome(WRONG, off)


def planned(model: nn.Module, layered: LayeredModel, batch: Batch, training: Training) -> Plan:
    """What the planner chooses for two CPU processes."""
    setup: dict[str, Any] = {"batch": _ROWS, "precision": "fp32", "dropout": False}
    if not isinstance(layered, Generic):
        if "input_ids" in batch:
            setup["sequence_length"] = LENGTH
        return galvatron.plan(model, _two_processes(), attention=training.attention.value, **setup)
    return galvatron.plan(galvatron.describe(model, batch, training), _two_processes(), **setup)


def _two_processes() -> Cluster:
    base = load_cluster("cpu-4")
    return replace(base, name="cpu-2", levels=(replace(base.levels[0], units=_RANKS),))


# What differs


def _losses_off(theirs: Sequence[float], ours: Sequence[float]) -> str | None:
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if not abs(one - other) <= _LOSS_TOLERANCE * max(1.0, abs(one)):
            return f"loss of step {step} is {other:.6g} instead of {one:.6g}"
    return None


def _gradients_off(theirs: Mapping[str, Tensor], ours: Iterator[tuple[str, Tensor]]) -> str | None:
    largest = max((float(own.abs().max()) for own in theirs.values() if own.numel()), default=0.0)
    return _off(theirs, ours, "gradient", lambda own: _GRADIENT_TOLERANCE * _height(own) + _NOISE * largest)


def _parameters_off(theirs: _Reference, ours: Iterator[tuple[str, Tensor]]) -> str | None:
    seen: set[str] = set()

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, own in ours:
            seen.add(theirs.first_names[name])
            yield name, own

    off = _off(
        theirs.parameters,
        noted(),
        "value after 3 steps",
        lambda own: _PARAMETER_TOLERANCE * max(1.0, _height(own)),
    )
    lost = sorted(set(theirs.first_names.values()) - seen)
    return off or (f"{lost[0]} is no parameter under the plan" if lost else None)


def _off(
    theirs: Mapping[str, Tensor], ours: Iterator[tuple[str, Tensor]], what: str, allowed: Callable[[Tensor], float]
) -> str | None:
    """The largest difference that is not allowed; takes all of ``ours``, which ranks give together."""
    worst, text = 0.0, None
    for name, own in ours:
        gap, most = _height(own - theirs[name]), allowed(theirs[name])
        share = gap / most if math.isfinite(gap) else math.inf
        if share > max(1.0, worst):
            worst, text = share, f"{what} of {name} is off by {gap:.2g} of at most {_height(theirs[name]):.2g}"
    return text


def _height(own: Tensor) -> float:
    return float(own.abs().max()) if own.numel() else 0.0


# Ranks


def _on_ranks(work: Callable[[], Outcome]) -> Outcome:
    """The work on two ranks, forked for it: what the first of them says, or the first error."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipes: list[Connection] = []
        processes = []
        for rank in range(_RANKS):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, Path(folder) / "store", there, work), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _first_said(pipes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _first_said(pipes: Sequence[Connection]) -> Outcome:
    waiting = dict(enumerate(pipes))
    said: list[Outcome] = []
    end = time.monotonic() + _COLUMN_S
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            return _worst(said) if said else Outcome(FAILED, f"its ranks did not answer within {_COLUMN_S:g} s")
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                said.append(waiting.pop(rank).recv())
            except EOFError:
                said.append(Outcome(FAILED, f"rank {rank} died"))
            if said[-1].outcome in (REFUSED, FAILED):
                end = min(end, time.monotonic() + _REST_S)
    return _worst(said)


def _worst(said: Sequence[Outcome]) -> Outcome:
    """A refusal comes first: what the others met is its consequence."""
    order = (REFUSED, FAILED, WRONG, EQUAL)
    return min(said, key=lambda own: order.index(own.outcome))


def _rank(rank: int, store: Path, pipe: Connection, work: Callable[[], Outcome]) -> None:
    faulthandler.enable()  # where a rank dies
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(_RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(_RANKS))
    outcomes: list[Outcome] = []

    def joined() -> None:
        dist.init_process_group("gloo", store=FileStore(str(store), _RANKS), rank=rank, world_size=_RANKS)
        outcomes.append(work())

    outcome = _tried(joined)
    pipe.send(outcomes[0] if outcome.outcome == EQUAL else outcome)
    with contextlib.suppress(EOFError, OSError):
        time.sleep(_COLUMN_S)  # until the parent ends it: others may still read what this rank sends
