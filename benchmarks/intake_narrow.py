"""bf16 with one architecture of the intake, in a process of its own: a step under five plans is about as near to one
in fp32 as the stock model's in bf16.

Where anything computes in another type than its weights have, fp32 shows nothing: there all types are one.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import galvatron
from galvatron.core.spec import Training
from galvatron.families.build import without_weights
from galvatron.families.layer import Batch, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.trial import own_loss, trial_batches
from intake_models import LENGTH, Architecture
from intake_run import Outcome, _apart, _Case, _on_ranks, _Refused, _tried
from intake_table import EQUAL, WRONG, read

__all__ = ["NARROW_COLUMNS", "examine_narrow"]

NARROW_COLUMNS = ("DP", "SDP", "PP", "TP", "EP")
"""With recompute and a fused loss; ZeRO-3 and ZeRO-2 by turns; in two stages; with all split that can be; with experts
divided."""
_ROWS = 8
_OF_STOCK = 2.0
"""Times the stock model's own error: where sums are rounded is chance."""
_ALLOWED = 2.0**-8
"""Relative to fp32: what is allowed where the stock model happens to err by less."""
_AGAIN = 8
"""With how many other weights a column is tried that errs by more. Where rounding turns a router or a ReLU, whose error
is the larger one is chance, too; the median of all tries is not."""
_FP32_RESULTS = Path(__file__).parent / "results" / "intake.jsonl"


@dataclass(frozen=True, slots=True)
class _Step:
    """What a model does with one batch."""

    loss: float
    gradients: dict[str, Tensor]

    def off(self, wide: _Step) -> tuple[float, float]:
        """How far loss and gradients are from those in fp32, relative to these. Tied parameters have several names."""
        gap = _height(own - wide.gradients[name] for name, own in self.gradients.items())
        return abs(self.loss / wide.loss - 1), gap / _height(wide.gradients[name] for name in self.gradients)


def examine_narrow(architecture: Architecture) -> dict[str, Any]:
    """The architecture's row."""
    started = time.monotonic()
    columns = _columns(architecture)
    row = {name: asdict(columns[name]) for name in NARROW_COLUMNS}
    return {"columns": row, "seconds": round(time.monotonic() - started, 1)}


def _columns(architecture: Architecture) -> dict[str, Outcome]:
    found: dict[str, Any] = {}

    def prepare() -> None:
        model, training = architecture.model()
        layered = layered_model(without_weights(model))
        batch = trial_batches(layered, model, (_ROWS, LENGTH))["plain"]
        found.update(model=model, training=training, layered=layered, batch=batch)

    outcome = _tried(prepare)
    if outcome.outcome != EQUAL:
        return dict.fromkeys(NARROW_COLUMNS, outcome)
    case = _Narrow(**found)
    outcome = _tried(lambda: case.steps)
    if outcome.outcome != EQUAL:
        return dict.fromkeys(NARROW_COLUMNS, outcome)
    plans = {
        "DP": case.copied, "SDP": case.sharded, "PP": case.staged, "TP": lambda: case.split(architecture.name),
        "EP": case.known.expert_parallel,
    }  # fmt: skip
    return {name: _column(case, plan) for name, plan in plans.items()}


def _column(case: _Narrow, plan: Callable[[], Plan]) -> Outcome:
    made: list[Plan] = []
    outcome = _tried(lambda: made.append(plan()))
    if outcome.outcome != EQUAL:
        return outcome
    ours, theirs = [], []
    for number in range(1 + _AGAIN):
        own = case.varied(number) if number else case
        wide, narrow = own.steps  # before ranks are forked
        outcome = _on_ranks(partial(own.under, made[0]))
        if outcome.outcome != EQUAL:
            return outcome
        ours.append(json.loads(outcome.reason))
        theirs.append(narrow.off(wide))
        off = _too_far(np.median(ours, axis=0), np.median(theirs, axis=0))
        if off is None and number in (0, _AGAIN):
            return Outcome(EQUAL, f"the median of {1 + _AGAIN} tries" if number else "")
    return Outcome(WRONG, off or "")


def _too_far(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> str | None:
    """Errors of the loss and of all gradients together."""
    for what, one, other in zip(("its loss is", "gradients are"), ours, theirs, strict=True):
        if not one <= max(_OF_STOCK * other, _ALLOWED):
            return f"{what} off by {one:.1%}, the stock model's by {other:.1%}"
    return None


@dataclass(frozen=True)
class _Narrow:
    model: nn.Module
    training: Training
    layered: LayeredModel
    batch: Batch

    @cached_property
    def steps(self) -> tuple[_Step, _Step]:
        """Of the stock model in fp32 and in bf16."""
        found: list[_Step] = []
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            said = _tried(partial(self._into, found, dtype))
            if said.outcome != EQUAL:
                raise _Refused(f"the stock model itself does not train in {name}: {said.reason}")
        wide, narrow = found
        return wide, narrow

    def _into(self, found: list[_Step], dtype: torch.dtype) -> None:
        found.append(_apart(partial(self._alone, dtype)))

    def varied(self, seed: int) -> _Narrow:
        """Another model of its kind."""
        model, noise = copy.deepcopy(self.model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for own in model.parameters():
                own.mul_(1 + 0.05 * torch.randn(own.shape, generator=noise))
        return replace(self, model=model)

    def _alone(self, dtype: torch.dtype) -> _Step:
        """The stock model's step in one process."""
        model = copy.deepcopy(self.model).to(dtype)
        batch = {key: own.to(dtype) if own.is_floating_point() else own for key, own in self.batch.items()}
        loss = own_loss(model, batch, None)
        torch.autograd.backward(loss)
        named = model.named_parameters(remove_duplicate=False)
        return _Step(float(loss), {key: _float(own.grad, own) for key, own in named})

    def copied(self) -> Plan:
        layers = self.layered.layers
        switches = ["", *["+rc"] * (len(layers) - 2), "+fl" if layers[-1].projection else ""]
        return self._plan([[f"dp2{switch}" for switch in switches]])

    def sharded(self) -> Plan:
        turns = ["sdp2", "dp2+zero2"] * len(self.layered.layers)
        return self._plan([turns[: len(self.layered.layers)]])

    def staged(self) -> Plan:
        count = len(self.layered.layers)
        return self._plan([["single"] * (count // 2), ["single"] * (count - count // 2)])

    def split(self, name: str) -> Plan:
        """Whether it can be, the run in fp32 found."""
        known = read(_FP32_RESULTS).get(name, {}).get("columns", {}).get("TP", {})
        if known.get("outcome") != EQUAL:
            raise _Refused(f"in fp32: {known.get('reason') or 'not tried'}")
        kinds = {kind.name: kind for kind in self._plan([["dp2"] * len(self.layered.layers)]).model.kinds}
        layers = self.layered.layers
        able = [bool(layer.rules) and kinds[layer.kind].allows_tensor_parallel(2) for layer in layers]
        fused = [layer.projection is not None and can for layer, can in zip(layers, able, strict=True)]
        return self._plan(
            [[("tp2+fl" if fl else "tp2") if can else "dp2" for can, fl in zip(able, fused, strict=True)]]
        )

    @property
    def known(self) -> _Case:
        return _Case(self.model, self.training, self.layered, [self.batch])

    def _plan(self, stages: list[list[str]]) -> Plan:
        return self.known.unpriced(stages)

    def under(self, plan: Plan) -> Outcome:
        """On a rank. The reason has the errors."""
        parallel = galvatron.parallelize(self.model, plan, check=False, device="cpu", dtype="bf16")
        loss = float(parallel.forward_backward(self.batch))
        step = _Step(loss, {name: own.float() for name, own in parallel.whole_gradients()})
        return Outcome(EQUAL, json.dumps(step.off(self.steps[0])))


def _float(gradient: Tensor | None, own: Tensor) -> Tensor:
    return torch.zeros_like(own, dtype=torch.float32) if gradient is None else gradient.float()


def _height(tensors: Iterable[Tensor]) -> float:
    return float(sum(own.square().sum() for own in tensors) ** 0.5)
