"""Strict reading of plan files: whatever is wrong is said with the path of the field, before anything starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from galvatron.core.errors import InvalidInput, PlanMismatch
from galvatron.core.files.reader import field_path, invalid, naming, parse, read_text, shown
from galvatron.core.spec import LAYER_SWITCHES, Kind, LayerSpec, Strategy, optimizer_named, schedule_named
from galvatron.core.spec.figures import MOST_LAYERS, MOST_SAMPLES
from galvatron.planner.cost import CONVENTIONS
from galvatron.planner.plan.record import FORMAT_VERSION, PlanRecord
from galvatron.planner.search import CutRule, most_micro_batches
from galvatron.planner.space import space_named

__all__ = ["read_plan"]

_Plan = TypeVar("_Plan", bound=PlanRecord)
_REMEDY = "make the plan again with 'galvatron plan'"


def read_plan(path: Path, kind: type[_Plan]) -> _Plan:
    """The plan in a file, checked for shape, version, digests and consistency."""
    where = str(path)
    text = read_text(path, "a plan in JSON")
    raw = parse(text, where, "JSON")
    if not isinstance(raw, dict) or "version" not in raw:
        raise InvalidInput(f"{where}: not a plan file: it has no 'version' field")
    if raw["version"] != FORMAT_VERSION or isinstance(raw["version"], bool):
        raise PlanMismatch(
            f"{where}: version: {shown(raw['version'])} is not what this program reads, {FORMAT_VERSION}; {_REMEDY}"
        )
    if wild := _wild({key: value for key, value in raw.items() if key != "model"}):
        raise InvalidInput(f"{where}: {wild}; {_REMEDY}")
    try:
        with naming(where):
            plan = TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InvalidInput(f"{invalid(error, where)}; {_REMEDY}") from None
    except RecursionError as error:
        raise InvalidInput(f"{where}: not a plan file: nested too deeply") from error
    stray = _stray(raw, plan.to_dict())
    if stray:
        raise InvalidInput(f"{where}: {stray}; {_REMEDY}")
    try:
        _check(plan)
    except InvalidInput as error:
        raise type(error)(f"{where}: {error}; {_REMEDY}") from error
    return plan


def _wild(given: Any, at: tuple[int | str, ...] = ()) -> str | None:
    """The first number that no plan has: infinite, or beyond what 64 bits hold. Facts of the model check their own."""
    if isinstance(given, dict | list):
        places = given.items() if isinstance(given, dict) else enumerate(given)
        return next(filter(None, (_wild(value, (*at, key)) for key, value in places)), None)
    if isinstance(given, int | float) and not -(2**63) < given < 2**63:
        return f"{field_path(at)}: {shown(given)} is out of range"
    return None


def _stray(given: Any, known: Any, at: tuple[int | str, ...] = ()) -> str | None:
    """The first field in the file that the format does not have, or the other way round: nothing is defaulted."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key in [*given, *known]:
            if key not in known:
                return f"{field_path((*at, key))}: unknown field"
            if key not in given:
                return f"{field_path((*at, key))}: missing field"
            if found := _stray(given[key], known[key], (*at, key)):
                return found
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (one, other) in enumerate(zip(given, known, strict=False)):
            if found := _stray(one, other, (*at, index)):
                return found
    return None


def _check(plan: PlanRecord) -> None:
    """What types cannot say: facts that must agree with each other."""
    optimizer_named(plan.model.training.optimizer, where="model.training.optimizer")
    names = {kind.name for kind in plan.model.kinds}
    for index, run in enumerate(plan.model.order):
        if run.layer not in names:
            raise InvalidInput(f"model.order[{index}].layer: {run.layer!r} is not among model.kinds")
        if not 0 < run.count <= MOST_LAYERS:
            raise InvalidInput(f"model.order[{index}].count: {run.count} is not a number of layers")
    if sum(run.count for run in plan.model.order) > MOST_LAYERS:
        raise InvalidInput(f"model.order: it has more than {MOST_LAYERS} layers")
    if not plan.model.order:
        raise InvalidInput("model.order: the model has no layers")
    config = plan.model.config
    if config is not None and not isinstance(config.get("model_type"), str):
        raise InvalidInput(f"model.config.model_type: {config.get('model_type')!r} is not the name of an architecture")
    model = plan.model.spec()
    if model.digest != plan.model.digest:
        raise PlanMismatch(f"model.digest: {plan.model.digest!r} does not match the model's facts ({model.digest!r})")
    cluster = plan.cluster.facts
    if cluster.digest != plan.cluster.digest:
        raise PlanMismatch(f"cluster.digest: {plan.cluster.digest!r} does not match its facts ({cluster.digest!r})")
    if plan.cluster.devices != cluster.devices:
        raise InvalidInput(f"cluster.devices: {plan.cluster.devices} given, but its levels make {cluster.devices}")
    if model.parameters != plan.model.parameters:
        raise InvalidInput(f"model.parameters: {plan.model.parameters} given, but the layers have {model.parameters}")
    _check_space(plan)
    _check_numbers(plan)
    _check_stages(plan, model.layers)
    _check_times(plan)


def _check_space(plan: PlanRecord) -> None:
    space = plan.space
    space_named(space.name)
    for name, value, known in (
        ("cuts", space.cuts, list(CutRule)),
        ("conventions", space.conventions, [each.name for each in CONVENTIONS]),
    ):
        if value not in known:
            raise InvalidInput(f"space.{name}: {value!r} is not one of {', '.join(known)}")
    if plan.batch not in space.batches or min(space.batches) < 1 or max(space.batches) > MOST_SAMPLES:
        raise InvalidInput(
            f"space.batches: they are not from 1 to {MOST_SAMPLES}, or do not hold the plan's batch of {plan.batch}"
        )
    _check_limits(plan)
    if not 0 < (1 if space.stages_a_micro_batch is None else space.stages_a_micro_batch) <= 1_000_000:
        raise InvalidInput(f"space.stages_a_micro_batch: {space.stages_a_micro_batch} given; expected from 1 on")
    most = most_micro_batches(space.max_micro_batches, space.stages_a_micro_batch, plan.pipeline_degree)
    if most is not None and most < plan.micro_batches:
        raise InvalidInput(
            f"space.max_micro_batches: {space.max_micro_batches}, but the plan has {plan.micro_batches} micro-batches"
        )
    for index, time in enumerate(() if plan.profile is None else plan.profile.times):
        if not 0.01 <= time.backward_ratio <= 10_000:
            raise InvalidInput(f"profile.times[{index}].backward_ratio: {time.backward_ratio} given; expected above 0")
        for name, value in asdict(time).items():
            if name.endswith("_s") and value is not None and not (0 <= value < 1e6 and (value or name != "forward_s")):
                raise InvalidInput(f"profile.times[{index}].{name}: {value} given; expected seconds, forward_s above 0")


def _check_limits(plan: PlanRecord) -> None:
    """A plan keeps the limits that it says it was made within."""
    limits = plan.space.limits
    if limits is None:
        return
    if limits.pipeline_degree not in (None, len(plan.stages)):
        raise InvalidInput(
            f"space.limits.pipeline_degree: {limits.pipeline_degree}, but the plan has {len(plan.stages)} stages"
        )
    if limits.max_micro_batch is not None and plan.micro_batch > limits.max_micro_batch:
        raise InvalidInput(
            f"space.limits.max_micro_batch: {limits.max_micro_batch}, but micro-batches have {plan.micro_batch} samples"
        )
    pins = {pin.layer: pin.strategy for pin in limits.pins}
    for layer in (layer for stage in plan.stages for layer in stage.layers):
        if pins.get(layer.layer, layer.strategy) != layer.strategy:
            raise InvalidInput(
                f"space.limits.pins: {layer.layer!r} keeps {pins[layer.layer]!r}, but layer {layer.index} has "
                f"{layer.strategy!r}"
            )


def _check_numbers(plan: PlanRecord) -> None:
    certificate = plan.certificate
    if certificate is not None:
        if certificate.gap < 0 or not 0 < certificate.lower_bound_s <= plan.iteration_s:
            raise InvalidInput(
                "certificate: the bound must be positive and no more than iteration_s, the gap not negative"
            )
        if abs(plan.iteration_s / certificate.lower_bound_s - 1 - certificate.gap) > 1e-6 * (1 + certificate.gap):
            raise InvalidInput(
                f"certificate.gap: {certificate.gap} is not iteration_s / lower_bound_s - 1 = "
                f"{plan.iteration_s / certificate.lower_bound_s - 1}"
            )
        for name in ("combinations", "opened", "solved", "stages_solved"):
            if getattr(certificate, name) < 0:
                raise InvalidInput(f"certificate.{name}: {getattr(certificate, name)} given; expected at least 0")
        if not certificate.combinations >= certificate.opened >= certificate.solved:
            raise InvalidInput(
                f"certificate: {certificate.combinations} combinations, {certificate.opened} opened and "
                f"{certificate.solved} solved given; expected each to be at most the one before"
            )
    if not 0 < plan.memory_budget_bytes <= plan.cluster.facts.device.memory_bytes:
        raise InvalidInput(
            f"memory_budget_bytes: {plan.memory_budget_bytes} given; expected above 0 and at most the device's "
            f"{plan.cluster.facts.device.memory_bytes}"
        )
    for index, memory in enumerate(() if plan.profile is None else plan.profile.memory):
        if min(memory.activation_bytes, memory.transient_bytes) < 0:
            raise InvalidInput(f"profile.memory[{index}]: a size is negative; expected bytes from 0 on")
    if plan.bubble_s < 0 or any(min(asdict(stage.time).values()) < 0 or stage.time_s <= 0 for stage in plan.stages):
        raise InvalidInput("bubble_s or stages[].time: a time is negative")
    schedule_named(plan.schedule)
    if plan.batch < 1 or plan.micro_batches < 1 or plan.batch % plan.micro_batches:
        raise InvalidInput(f"micro_batches: {plan.micro_batches} does not divide the batch of {plan.batch}")
    if not plan.iteration_s > 0 or abs(plan.throughput * plan.iteration_s / plan.batch - 1) > 1e-6:
        raise InvalidInput(
            f"throughput: {plan.throughput} is not batch / iteration_s = {plan.batch} / {plan.iteration_s}"
        )


def _check_times(plan: PlanRecord) -> None:
    """Times of an iteration and of its stages agree."""
    near = 1e-6 * plan.iteration_s + 2e-9 * plan.micro_batches  # times are whole nanoseconds
    busy = plan.micro_batches * max((stage.time_s for stage in plan.stages), default=0.0)
    # Stages that share processors take turns: their own times are then those of all processors being taken.
    contention = plan.cluster.facts.compute_contention
    most = contention * plan.iteration_s + near
    if busy > most or abs(plan.bubble_s - max(0.0, plan.iteration_s - busy)) > near:
        raise InvalidInput(
            f"bubble_s: {plan.bubble_s} is not iteration_s less the micro-batches of the slowest stage = "
            f"{plan.iteration_s} - {busy}"
        )
    for p, stage in enumerate(plan.stages):
        own = asdict(stage.time)
        longest = max(own, key=lambda name: own[name])
        if max(own[longest], plan.micro_batches * own["compute_s"]) > most:
            raise InvalidInput(f"stages[{p}].time.{longest}: {own[longest]} is more than the iteration has")


def _check_stages(plan: PlanRecord, layers: tuple[LayerSpec, ...]) -> None:
    if not plan.stages or plan.cluster.devices % len(plan.stages):
        raise InvalidInput(f"stages: {len(plan.stages)} stages do not divide {plan.cluster.devices} devices equally")
    size = plan.cluster.devices // len(plan.stages)
    position = 0
    for p, stage in enumerate(plan.stages):
        if stage.devices != tuple(range(p * size, (p + 1) * size)):
            raise InvalidInput(f"stages[{p}].devices: expected {p * size} to {(p + 1) * size - 1}")
        if not stage.layers:
            raise InvalidInput(f"stages[{p}].layers: a stage needs at least one layer")
        expected = schedule_named(plan.schedule).in_flight(p, len(plan.stages), plan.micro_batches)
        if stage.in_flight != expected:
            raise InvalidInput(f"stages[{p}].in_flight: {stage.in_flight} given, {plan.schedule} holds {expected}")
        for index, layer in enumerate(stage.layers):
            where = f"stages[{p}].layers[{index}]"
            if position >= len(layers) or layer.index != position or layer.layer != layers[position].name:
                raise InvalidInput(f"{where}: layer {layer.index} ({layer.layer!r}) is not next in the model")
            _check_strategy(plan, layers[position], layer.strategy, size, where)
            position += 1
        use = asdict(stage.memory)
        if min(use.values()) < 0 or sum(use.values()) != stage.memory_bytes:
            raise InvalidInput(f"stages[{p}].memory_bytes: {stage.memory_bytes} is not the sum of stages[{p}].memory")
        if stage.memory_bytes > plan.memory_budget_bytes:
            raise InvalidInput(f"stages[{p}].memory_bytes: {stage.memory_bytes} is above the budget")
    if position != len(layers):
        raise InvalidInput(f"stages: they hold {position} of the model's {len(layers)} layers")


def _check_strategy(plan: PlanRecord, layer: LayerSpec, text: str, size: int, where: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except InvalidInput as error:
        raise InvalidInput(f"{where}.strategy: {error}") from error
    if strategy.devices != size:
        raise InvalidInput(f"{where}.strategy: {text!r} is for {strategy.devices} devices, the stage has {size}")
    if not layer.allows_tensor_parallel(strategy.degree(Kind.TP)):
        raise InvalidInput(
            f"{where}.strategy: {text!r} splits {layer.name!r} by a degree that its heads do not divide by"
        )
    if strategy.sequence_parallel and not layer.allows_sequence_parallel(strategy.degree(Kind.TP)):
        lengths = layer.tensor_parallel.sequence_divides if layer.tensor_parallel else ()
        having = f"sequences of {', '.join(map(str, lengths))}" if lengths else "nothing to divide along a sequence"
        raise InvalidInput(f"{where}.strategy: {text!r} divides sequences, but {layer.name!r} has {having}")
    if not layer.allows_experts(strategy):
        having = f"{layer.experts.count} experts of width {layer.experts.divides}" if layer.experts else "no experts"
        raise InvalidInput(f"{where}.strategy: {text!r} divides experts, but {layer.name!r} has {having}")
    if strategy.fused_loss and layer.fused_loss is None:
        raise InvalidInput(f"{where}.strategy: {text!r} fuses a loss, but {layer.name!r} has none that can be")
    if strategy.float8 and layer.float8 is None:
        raise InvalidInput(
            f"{where}.strategy: {text!r} is in float8, but {layer.name!r} has no linear layers that it pays for"
        )
    if not layer.allows_grade(strategy):
        raise InvalidInput(
            f"{where}.strategy: {text!r} keeps some results of {layer.name!r} or has them on the host, but the plan's "
            "model does not say what they are"
        )
    if strategy.experts and not plan.space.expert_parallel:
        raise InvalidInput(f"{where}.strategy: {text!r} has ep, which space.expert_parallel says was off")
    for name in (switch.name for switch in LAYER_SWITCHES):
        if getattr(strategy, name) and not getattr(plan.space, name):
            raise InvalidInput(f"{where}.strategy: {text!r} uses {name}, which space.{name} says was off")
    if plan.micro_batch % strategy.data_degree:
        raise InvalidInput(
            f"{where}.strategy: {text!r} divides the batch by {strategy.data_degree}, "
            f"but a micro-batch has {plan.micro_batch} samples"
        )
