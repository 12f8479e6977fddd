"""What of a stock model is frozen: by patterns of names, and what that leaves of the planner's figures.

Names are those of the stock model's parameters. A pattern is a shell's (``*``, ``?``, ``[0-3]``), and names a parameter
or a module: then all that is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from galvatron.core.errors import InvalidInput, PlanMismatch
from galvatron.core.spec import LayerSpec, ModelSpec, Training
from galvatron.core.spec.tuning import Tuning
from galvatron.families.layer import Layer, LayeredModel
from galvatron.families.lora import all_names, is_adapter, plain_name
from galvatron.families.rules import Columns, Rows, Table, Vocabulary

__all__ = ["check_frozen", "freeze", "frozen_parts", "tuned"]


def freeze(model: nn.Module, training: Training) -> None:
    """Freeze the parameters of a model that do not train."""
    for own in _frozen(model, training):
        own.requires_grad_(False)


def check_frozen(model: nn.Module, training: Training) -> None:
    """Raise :class:`PlanMismatch` if a model in memory trains what its plan froze, for that would not fit, or the other
    way round what trains beside adapters, for these are exported together."""
    frozen = _frozen(model, training)
    for name, own in model.named_parameters():
        if training.lora is not None and training.lora.trains(name) and not own.requires_grad:
            raise PlanMismatch(
                f"model: its parameter {name} is frozen, but the plan was made for one in which it trains beside the "
                "adapters; unfreeze it (modules_to_save of LoraConfig), or plan again for this model"
            )
        if own in frozen and own.requires_grad:
            raise PlanMismatch(
                f"model: its parameter {name} trains, but the plan was made for one in which it is frozen; freeze it "
                "(requires_grad_(False)), or plan again for this model"
            )


def frozen_parts(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules and parameters of a model that are frozen, those inside of others left out."""
    found: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        flags = [own.requires_grad for own in module.parameters()]
        if flags and not any(flags):
            found.append(name)
        elif not all(flags):
            found.extend(
                f"{name}.{each}".lstrip(".")
                for each, own in module.named_parameters(recurse=False)
                if not own.requires_grad
            )
            for each, child in module.named_children():
                visit(child, f"{name}.{each}".lstrip("."))

    visit(model, "")
    if "" in found:
        raise InvalidInput("model: all of its parameters are frozen, so there is nothing to train; unfreeze some")
    return tuple(dict.fromkeys(found))


def _frozen(model: nn.Module, training: Training) -> set[nn.Parameter]:
    """A tied weight is frozen where any of its names is; it trains only if one of them is to. With adapters, all else
    is frozen but modules that train beside them."""
    lora = training.lora
    if lora is not None:
        return {own for name, own in model.named_parameters() if not is_adapter(name) and not lora.trains(name)}
    names = all_names(model)
    for option, patterns in (("freeze", training.freeze), ("train-only", training.train_only)):
        for pattern in patterns:
            if not any(_fits(name, [pattern]) for found in names.values() for name in found):
                shown = ", ".join(name for found in list(names.values())[:3] for name in found[:1])
                raise InvalidInput(
                    f"{option}: {pattern!r} fits no parameter of {type(model).__name__}; expected names such as "
                    f"{shown}, of modules that hold them, or patterns of these with *"
                )
    frozen = {own for own, found in names.items() if any(_fits(name, training.freeze) for name in found)}
    if training.train_only:
        frozen |= {own for own, found in names.items() if not any(_fits(name, training.train_only) for name in found)}
    if len(frozen) == len(names) and not training.lora:
        raise InvalidInput("freeze: all parameters of the model are frozen, so there is nothing to train; freeze fewer")
    return frozen


def _fits(name: str, patterns: Iterable[str]) -> bool:
    parts = name.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)


# Figures


def tuned(spec: ModelSpec, layered: LayeredModel, training: Training) -> ModelSpec:
    """The model's figures with what is frozen in its layers taken out of states, synchronisation and backward.

    ``layered``: the model, frozen as it will be. Layers of one kind that are frozen otherwise are of different kinds.
    """
    if len(layered.layers) != len(spec.layers):
        raise InvalidInput(
            f"{spec.name}: its facts have {len(spec.layers)} layers, the model itself {len(layered.layers)}, so that "
            "nothing can be frozen; describe the model anew"
        )
    later = {use for tie in layered.ties if not tie.small for use in tie.uses[1:]}
    named: dict[tuple[str, Tuning], str] = {}
    layers = []
    for index, (layer, facts) in enumerate(zip(layered.layers, spec.layers, strict=True)):
        tied = [use.name for use in later if use.layer == index]
        own = _tuning(layer, facts, tied, backward=index >= layered.first_trained)
        own = _with_adapters(own, layer, facts, spec.training)
        layers.append(facts if own == Tuning() else facts.tuned(own, _named(facts, own, named)))
    return replace(
        spec, layers=tuple(layers), training=replace(training, sequence_length=spec.training.sequence_length)
    )


def _tuning(layer: Layer, facts: LayerSpec, tied: Sequence[str], *, backward: bool) -> Tuning:
    frozen = {plain_name(name): own.numel() for name, own in layer.named_parameters() if not own.requires_grad}
    split = split_parameters(layer)
    # No more than the facts have: those count small tables, which all blocks of a stack share, once.
    count = min(sum(frozen.values()), facts.parameters)
    whole = min(sum(size for name, size in frozen.items() if name not in split), facts.replicated_parameters)
    experts = 0
    if layer.experts is not None and facts.experts is not None:
        names = [f"{layer.experts.path}.{name}" for name in layer.experts.parameters]
        experts = facts.experts.parameters if all(name in frozen for name in names) else 0
    return Tuning(
        frozen_parameters=count,
        frozen_replicated_parameters=0 if facts.tensor_parallel is None else whole,
        frozen_tied_parameters=min(sum(frozen.get(name, 0) for name in tied), facts.tied_parameters),
        frozen_expert_parameters=experts,
        backward=backward,
    )


def _with_adapters(own: Tuning, layer: Layer, facts: LayerSpec, training: Training) -> Tuning:
    """What low-rank adapters add: two thin products, and what lies between them."""
    columns = {f"{rule.path}.lora_B." for rule in layer.rules if isinstance(rule, Columns)}
    rows = {f"{rule.path}.lora_A." for rule in layer.rules if isinstance(rule, Rows)}
    split = tuple(columns | rows)
    count, whole, ranks, width = 0, 0, 0, 1
    for name, stock, weight in layer.stock_parameters():  # parts of traced layers have names of their own
        if not is_adapter(stock):
            continue
        count += weight.numel()
        whole += 0 if name.startswith(split) else weight.numel()
        if ".lora_A." in stock:
            ranks, width = ranks + len(weight), weight.shape[1] if not ranks else width
    tokens = training.sequence_length or max(1, facts.boundary_bytes // training.precision.bytes // width)
    return replace(
        own,
        adapter_parameters=count,
        adapter_replicated_parameters=0 if facts.tensor_parallel is None else whole,
        adapter_flops=2 * tokens * count,
        adapter_activation_bytes=tokens * ranks * training.precision.bytes,
    )


def split_parameters(layer: Layer) -> frozenset[str]:
    """Names of the parameters of a layer that tensor parallelism divides."""
    ends = {Columns: ("weight", "bias"), Rows: ("weight",), Vocabulary: ("weight",)}
    found = {rule.path for rule in layer.rules if isinstance(rule, Table)}
    for rule in layer.rules:
        if isinstance(rule, Columns | Rows | Vocabulary):
            found |= {f"{rule.path}.{end}" for end in ends[type(rule)]}
    return frozenset(found)


def _named(facts: LayerSpec, own: Tuning, named: dict[tuple[str, Tuning], str]) -> str:
    if (facts.name, own) not in named:
        all_ = own.frozen_parameters >= facts.parameters
        label = ("passed" if own.backward else "frozen") if all_ else "partly"
        label = "lora" if own.adapter_parameters else label
        alike = sum(name.rstrip("0123456789") == f"{facts.name}+{label}" for name in named.values())
        named[facts.name, own] = f"{facts.name}+{label}{alike + 1 if alike else ''}"
    return named[facts.name, own]
