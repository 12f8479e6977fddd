"""Runs a tiny copy of a model on local CPU processes and compares it with the stock model: under a plan, or under one
of each kind of strategy. The comparison is ``galvatron.runtime.verify``; no torch until the processes do it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import Attention, LayerSpec, Training
from galvatron.families import load_model
from galvatron.families.discovery import family_of
from galvatron.families.huggingface import read_content
from galvatron.families.presets import find_preset
from galvatron.planner.plan.plan import Plan
from galvatron.processes.helper import measured
from galvatron.runtime.unpriced import facts_of, unpriced
from galvatron.train.start import is_plan

if TYPE_CHECKING:
    from torch import nn

    from galvatron.families.layer import LayeredModel
    from galvatron.processes.peers import Peers

__all__ = ["Verdict", "check"]

_DEVICES, _MOST_DEVICES = 4, 16
_Stages = list[list[str]]
"""For each stage, the strategies of its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How training under one plan compares with one process."""

    name: str
    equal: bool | None
    """None: it was not run."""
    reason: str = ""
    """Why not, or in which way it differs."""


def check(source: str, devices: int | None = None) -> list[Verdict]:
    """Compare a plan file, or a model (preset, configuration or folder) under strategies for so many processes."""
    job = _job(source, devices)
    with _without_gpus():
        found: list[Verdict] = measured(job, None)
    return found


def _job(source: str, devices: int | None) -> _Job:
    if is_plan(source):
        plan = Plan.load(source)
        if devices is not None and devices != plan.cluster.devices:
            raise InvalidInput(f"devices: {devices} given, but {source} is for {plan.cluster.devices}; leave it out")
        if plan.model.config is None:
            raise InvalidInput(
                f"{source}: its model was described by figures alone (model.config is null), so there is nothing to run"
            )
        config, named = plan.model.config, plan.model.family == "generic"
        name, plans, count = plan.model.name, plan, plan.cluster.devices
    else:
        config = _configuration(source)
        named = family_of(config.get("model_type")) is None
        name, plans, count = Path(source).name or source, None, _DEVICES if devices is None else devices
    if not 1 <= count <= _MOST_DEVICES:
        given = f"{source} is for {count} devices" if plans else f"devices: {count} given"
        raise InvalidInput(
            f"{given}; expected 1 to {_MOST_DEVICES}, because each is a process of this machine; a larger plan can be "
            "checked when it starts: parallelize(…, check=True)"
        )
    return _Job(name=name, config=json.dumps(config), as_named=named, plan=plans, devices=count)


def _configuration(source: str) -> dict[str, Any]:
    """The Hugging Face configuration of a model of any architecture."""
    path = Path(source)
    if find_preset(source) is None and (path.suffix == ".json" or os.path.isdir(path)):
        return read_content(path)
    config = load_model(source, Training()).config
    if config is None:
        raise InvalidInput(
            f"{source}: describes layers by figures alone, so there is nothing to run; give a Hugging Face "
            "configuration or a preset"
        )
    return dict(config)


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Any number of processes runs on CPUs, whatever GPUs there are."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


# On the ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What the processes do (see :class:`galvatron.processes.job.Job`)."""

    name: str
    config: str
    """As JSON."""
    as_named: bool
    plan: Plan | None
    """None: one of each kind of strategy."""
    devices: int

    def prepare(self) -> None:
        from galvatron.runtime import verify  # noqa: F401

        with suppress(GalvatronError):  # which the ranks will meet, and say
            _stock(self.config, self.as_named)

    def measure(self, peers: Peers) -> list[Verdict]:
        from galvatron.runtime.checks import check_model

        peers.join()
        model, layered = _stock(self.config, self.as_named)
        training = _training(self.config, self.as_named)
        if self.plan is not None:
            check_model(self.plan, layered)
            return [self._verdict(self.name, self.plan, peers)]
        _withhold_wrong_guesses(model, layered, training)
        facts = facts_of(layered, training, self.name)
        layers, split = facts.spec().layers, [bool(layer.rules) for layer in layered.layers]
        experts = [layer.experts.count if layer.experts else 0 for layer in layered.layers]
        whole = [layered.why_undivided(index) for index in range(len(layers))]
        examples = [
            *_examples(self.devices, layers, split),
            *_with_context(self.devices, whole),
            *_with_experts(self.devices, layers, split, experts),
        ]
        verdicts = []
        for name, stages in examples:
            if isinstance(stages, str):
                verdicts.append(Verdict(name=name, equal=None, reason=stages))
            else:
                plan = unpriced(facts, stages)
                check_model(plan, layered)
                verdicts.append(self._verdict(name, plan, peers))
        return verdicts

    def _verdict(self, name: str, plan: Plan, peers: Peers) -> Verdict:
        from galvatron.runtime.trial import NotChecked
        from galvatron.runtime.verify import difference

        model, _ = _stock(self.config, self.as_named)
        try:
            found = difference(model, plan, device=peers.device)
        except NotChecked as reason:
            return Verdict(name=name, equal=None, reason=str(reason))
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise GalvatronError(
                f"check: {self.name} under {name}: rank {peers.rank} failed with {type(error).__name__}: {text}"
            ) from error
        return Verdict(name=name, equal=found is None, reason=found or "")


@cache
def _stock(config: str, as_named: bool) -> tuple[nn.Module, LayeredModel]:
    """The model without weights, and its layers: made once, before the processes are forked."""
    from galvatron.families.build import build_meta, without_weights
    from galvatron.families.registry import layered_model

    model = build_meta(json.loads(config), _training(config, as_named), as_named=as_named)
    return model, layered_model(without_weights(model))


def _training(config: str, as_named: bool) -> Training:
    """With fused attention where the model has it."""
    from galvatron.families.build import read_config, stock_class

    stock: Any = stock_class(read_config(json.loads(config)), as_named=as_named)
    return Training(dropout=False, attention=Attention.FUSED if stock._supports_sdpa else Attention.EAGER)


def _withhold_wrong_guesses(model: nn.Module, layered: LayeredModel, training: Training) -> None:
    """Leave out tensor-parallel rules that are a guess and wrong, as the planner does."""
    from galvatron.families.generic.adapter import Generic
    from galvatron.runtime.split_trial import split_problems

    if not isinstance(layered, Generic) or not layered.tensor_rules.guessed:
        return
    whole, divided = split_problems(model, training, layered.tensor_rules)
    if divided is not None:
        layered.tensor_rules = replace(layered.tensor_rules, divisible=frozenset())
    if whole is not None:
        for layer in layered.layers:
            layer.rules = ()


def _examples(devices: int, layers: Sequence[LayerSpec], split: Sequence[bool]) -> Iterator[tuple[str, _Stages | str]]:
    """Strategies of each kind by name, or why there is none. ``split``: which layers TP can split."""
    count = len(layers)
    if devices == 1:
        yield "one process", [["single"] * count]
        yield "one process, recompute", [["single+rc"] * count]
        yield "one process, selective recompute", [list(islice(cycle(["single+rs", "single+ra"]), count))]
        return
    yield "DP", [[f"dp{devices}"] * count]
    yield "SDP", [[f"sdp{devices}"] * count]
    yield "ZeRO-2", [[f"dp{devices}+zero2"] * count]
    yield "SDP, recompute", [[f"sdp{devices}+rc"] * count]
    yield "SDP, selective recompute", [list(islice(cycle([f"sdp{devices}+rs", f"sdp{devices}+ra"]), count))]
    mixture = [f"sdp{devices}", f"dp{devices}", f"sdp{devices}+rc", f"dp{devices}+zero2"]
    halves = devices // 2
    if devices % 2 == 0 and halves > 1:
        mixture.insert(2, f"dp2-sdp{halves}")
    yield "DP and SDP mixed", [list(islice(cycle(mixture), count))]
    if devices % 2:
        yield "PP2, 1F1B", f"two stages do not divide {devices} processes"
    else:
        each = f"dp{halves}" if halves > 1 else "single"
        yield "PP2, 1F1B", [[each] * (count // 2), [each] * (count - count // 2)]
    yield from _with_tensor_parallelism(devices, layers, split)


def _with_tensor_parallelism(
    devices: int, layers: Sequence[LayerSpec], split: Sequence[bool]
) -> Iterator[tuple[str, _Stages | str]]:
    """With the highest degree that divides the heads; layers that cannot be split are under DP."""
    able = [layer for layer, can in zip(layers, split, strict=True) if can]
    if not able:
        yield "TP", "none of its layers can be split"
        return
    degree = _tensor_degree(devices, able)
    if degree is None:
        heads = sorted({n for layer in able if layer.tensor_parallel for n in layer.tensor_parallel.divides})
        yield "TP", f"no degree from 2 to {devices} divides the processes and its {' and '.join(map(str, heads))} heads"
        return
    rest = devices // degree
    outer = f"{rest}-" if rest > 1 else ""

    def stage(*strategies: str) -> list[str]:
        turns = cycle(strategies)
        return [next(turns) if can else f"dp{devices}" for can in split]

    tensor = f"dp{outer}tp{degree}" if outer else f"tp{degree}"
    yield "TP", [stage(tensor)]
    yield "TP, selective recompute", [stage(f"{tensor}+rs", f"{tensor}+ra")]
    sequence = [layer.allows_sequence_parallel(degree) for layer in layers]
    if any(sequence):
        flags = ["+sp" if can_divide and can else "" for can_divide, can in zip(sequence, split, strict=True)]
        yield "TP, sequence parallel", [[own + flag for own, flag in zip(stage(tensor), flags, strict=True)]]
    else:
        yield "TP, sequence parallel", "what its split parts leave whole cannot be divided along the sequence"
    sharded = f"sdp{outer}tp{degree}+rc" if outer else f"tp{degree}+rc"
    yield "DP, SDP and TP mixed", [stage(tensor, f"sdp{devices}", sharded, f"dp{devices}")]


def _with_context(devices: int, reasons: Sequence[str | None]) -> Iterator[tuple[str, _Stages | str]]:
    """Sequences divided; ``reasons``: of each layer, why its cannot be. Those layers are under DP. An embedding and a
    head alone are not worth it."""
    if devices == 1:
        return
    blocks = reasons[1:-1] or reasons
    if all(blocks):
        yield "CP", next(reason for reason in blocks if reason)
        return

    def stage(*strategies: str) -> _Stages:
        turns = cycle(strategies)
        return [[f"dp{devices}" if reason else next(turns) for reason in reasons]]

    yield "CP, ring", stage(f"ring{devices}")
    yield "CP, Ulysses", stage(f"ulysses{devices}")
    half = devices // 2
    if devices % 2 == 0 and half > 1:
        strategies = (f"ring2-ulysses{half}", f"sdp2-ring{half}+rc", f"ulysses2-ring{half}+zero3", f"dp2-ulysses{half}")
        yield "CP mixed", stage(*strategies)


def _degrees(devices: int) -> list[int]:
    return [degree for degree in range(devices, 1, -1) if devices % degree == 0]


def _tensor_degree(devices: int, layers: Sequence[LayerSpec]) -> int | None:
    """The highest that all these layers allow."""
    allowed = (each for each in _degrees(devices) if all(layer.allows_tensor_parallel(each) for layer in layers))
    return next(allowed, None)


def _with_experts(
    devices: int, layers: Sequence[LayerSpec], split: Sequence[bool], experts: Sequence[int]
) -> Iterator[tuple[str, _Stages | str]]:
    """With the highest degree that divides the experts; ``experts``: how many each layer has."""
    counts = [count for count in experts if count]
    if not counts or devices == 1:
        return
    degree = next((each for each in _degrees(devices) if not any(count % each for count in counts)), None)
    if degree is None:
        yield "EP", f"no degree from 2 to {devices} divides the processes and its {max(counts)} experts"
        return

    def stage(axes: str, kind: str, flag: str = "") -> list[str]:
        rest = f"{kind}{devices // degree}-" if devices > degree else ""
        return [f"{axes}/{rest}ep{degree}{flag}" if count else f"dp{devices}" for count in experts]

    yield "EP", [stage(f"dp{devices}", "dp")]
    if degree % 2 == 0 and degree > 2:
        half = f"sdp{devices}/sdp{2 * devices // degree}-ep{degree // 2}+rc"
        yield "EP over SDP, recompute", [[half if count else f"sdp{devices}" for count in experts]]
    else:
        yield "EP over SDP, recompute", [stage(f"sdp{devices}", "sdp", "+rc")]
    able = [layer for layer, can, count in zip(layers, split, experts, strict=True) if can and count]
    tensor = _tensor_degree(devices, able) if able else None
    if tensor is not None:
        axes = f"dp{devices // tensor}-tp{tensor}" if tensor < devices else f"tp{tensor}"
        yield "EP beside TP", [stage(axes, "dp")]
