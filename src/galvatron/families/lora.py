"""Low-rank adapters in peft's form: which projections of a model have one, and where their first values come from.

The modules are peft's own: a projection is wrapped, its weight is ``base_layer.weight``, and ``lora_A`` and ``lora_B``
stand beside it. peft is an extra: what only reads models that have no adapters does not import it.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.tuning import ALL_LINEAR, Lora, is_within

__all__ = [
    "ADAPTER",
    "Adapter",
    "adapter_of",
    "add_adapters",
    "all_names",
    "decided",
    "has_adapters",
    "is_adapter",
    "lora_of",
    "plain_name",
    "scale_at_rank",
    "trains_head",
    "without_adapter",
    "without_peft",
]

ADAPTER = "default"
"""What peft calls the adapter of a model that has one."""
_BASE = ".base_layer."
_HEADS = {"Classification": ("classifier", "score"), "QuestionAnswering": ("qa_outputs",)}
"""What trains beside adapters unless someone says otherwise, by how the class is called: peft's tasks have it so."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one projection."""

    down: nn.Linear
    """A: to the rank."""
    up: nn.Linear
    """B: from it."""
    scaling: float


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The stock model's name of a parameter that stands beside an adapter, or not."""
    return name.replace(_BASE, ".")


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of a projection, if it has one."""
    if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
        return None
    lora: Any = module
    return Adapter(lora.lora_A[ADAPTER], lora.lora_B[ADAPTER], float(lora.scaling[ADAPTER]))


def scale_at_rank(layer: nn.Module) -> None:
    """Let the adapters of a layer be scaled where they are narrow. peft scales their wide results, and so the gradients
    of these: two passes over memory for each projection, which keep compilers from adding within the product, too."""
    for module in layer.modules():
        if adapter_of(module) is not None:
            module.forward = MethodType(_adapted, module)


def _adapted(module: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """W x + B (scaling · A x)."""
    own = Adapter(module.lora_A[ADAPTER], module.lora_B[ADAPTER], module.scaling[ADAPTER])
    result: Tensor = module.base_layer(tensor, *args, **kwargs)
    low: Tensor = own.down(module.lora_dropout[ADAPTER](tensor.to(own.down.weight.dtype)))
    added: Tensor = own.up(low * own.scaling)
    return result + added.to(result.dtype)


def without_adapter(module: nn.Module) -> nn.Module:
    """The projection itself, where it has an adapter beside it."""
    base: Any = module if adapter_of(module) is None else module.base_layer
    stock: nn.Module = base
    return stock


def has_adapters(model: nn.Module) -> bool:
    """Whether any of its projections has one."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def without_peft(model: Any) -> Any:
    """The stock model inside a ``PeftModel``, with the adapters that it has; any other model itself. Raises
    :class:`InvalidInput` for adapters that we cannot run."""
    base = model
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        base = model.get_base_model()
        kinds = {str(getattr(own.peft_type, "value", own.peft_type)) for own in model.peft_config.values()} - {"LORA"}
        if kinds:
            raise InvalidInput(f"peft: the model is trained by {min(kinds)}; only LoRA can be run")
    base = _with_saved_modules(base)
    for name, module in base.named_modules():
        kind = type(module)
        if not kind.__module__.startswith("peft.") or name.endswith(tuple(_INSIDE)):
            continue
        reason = _unusable(module) if hasattr(module, "lora_A") else f"is peft's {kind.__name__}"
        if "forward" in vars(module):
            reason = "has a forward of its own"
        if reason is not None:
            raise InvalidInput(
                f"peft: {name} {reason}; expected LoRA on linear projections with one adapter named {ADAPTER!r}, "
                "not merged, without DoRA and bias"
            )
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is not None and adapter_of(head) is not None:
        raise InvalidInput("peft: the head has an adapter, which cannot be run; leave it out of target_modules")
    _check_trained(base)
    return base


def _with_saved_modules(base: Any) -> Any:
    """The same with what peft trains in the place of whole modules (``modules_to_save``) where those stood; the tensors
    are the same, the modules others: the model that was given stays peft's."""
    wrapped = [name for name, module in base.named_modules() if type(module).__name__ == "ModulesToSaveWrapper"]
    if not wrapped:
        return base
    names = all_names(base)
    alike = copy.deepcopy(base, {id(own): own for own in (*base.parameters(), *base.buffers())})
    inner = next((name for name in wrapped if any(name.startswith(f"{outer}.") for outer in wrapped)), None)
    if inner is not None:
        raise InvalidInput(f"peft: {inner} is inside of another module that is saved; name the outer one alone")
    for name in wrapped:
        wrapper = alike.get_submodule(name)
        if not all(own.requires_grad for own in wrapper.modules_to_save.parameters()):
            raise InvalidInput(
                f"peft: {name} is saved with the adapters, but frozen; unfreeze it (requires_grad_(True); "
                "PeftModel.from_pretrained(…, is_trainable=True))"
            )
        if (
            list(wrapper.modules_to_save) != [ADAPTER]
            or wrapper.active_adapters != [ADAPTER]
            or wrapper.disable_adapters
        ):
            raise InvalidInput(
                f"peft: {name} is saved for the adapters {', '.join(wrapper.modules_to_save)}, or they are turned off; "
                f"expected one, named {ADAPTER!r}"
            )
        originals = wrapper.original_module.parameters()
        tied = [each for own in originals for each in names[own] if not each.startswith(f"{name}.")]
        if tied:
            raise InvalidInput(
                f"peft: {name} is saved apart, but in the stock model it is tied to {tied[0]}; leave it out of "
                "modules_to_save, or untie the two"
            )
        parent, _, own = name.rpartition(".")
        setattr(alike.get_submodule(parent), own, wrapper.modules_to_save[ADAPTER])
    return alike


def all_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter; tied ones have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, own in model.named_parameters(remove_duplicate=False):
        names.setdefault(own, []).append(name)
    return names


def _full(model: nn.Module) -> tuple[str, ...]:
    """The modules of a model with adapters that train in full, those inside of others left out. Raises
    :class:`InvalidInput` for what trains beside adapters and is no module: exports would leave it out."""
    flags = {name: own.requires_grad for name, own in model.named_parameters() if not is_adapter(name)}
    found: list[str] = []
    for name, module in model.named_modules():
        own = [f"{name}.{each}" for each, _ in module.named_parameters()]
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if own and not inside and _BASE not in f"{name}." and all(flags.get(each, False) for each in own):
            found.append(name)
    names = all_names(model)
    for name, trains in flags.items():
        if not trains:
            continue
        if not any(name.startswith(f"{own}.") for own in found):
            raise InvalidInput(
                f"peft: {plain_name(name)} trains beside the adapters, and is not all of a module that has none, as "
                'peft would save it; freeze it (requires_grad_(False); in LoraConfig, bias="none"), or train all of '
                "the module (modules_to_save)"
            )
        if len(tied := names[model.get_parameter(name)]) > 1:
            raise InvalidInput(
                f"peft: {name} trains beside the adapters and is tied to {tied[1]}, which peft would load apart; "
                "freeze it, or untie them"
            )
    ends = tuple(found)
    if still := next((name for name, trains in flags.items() if not trains and is_within(name, ends)), None):
        raise InvalidInput(
            f"peft: {plain_name(still)} does not train, but its module's name ends like one that trains beside the "
            f"adapters, of {', '.join(found)}; peft saves modules by ends of names: train both, or none"
        )
    return ends


def _check_trained(model: nn.Module) -> None:
    """Of a model with adapters all of these train."""
    flags = {name: own.requires_grad for name, own in model.named_parameters() if is_adapter(name)}
    if not flags:
        return
    _full(model)
    still = next((name for name, trains in flags.items() if not trains), None)
    if still is not None:
        raise InvalidInput(
            f"peft: {still} is frozen; adapters train as a whole: unfreeze it (requires_grad_(True); "
            "PeftModel.from_pretrained(…, is_trainable=True))"
        )


_INSIDE = (".lora_dropout", ".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B", ".lora_magnitude_vector")


def _unusable(module: Any) -> str | None:
    """What is unusual about a projection with an adapter."""
    if hasattr(module, "parameter_name"):
        return f"adapts {module.parameter_name}, a weight of experts or of their router"
    if not isinstance(module.base_layer, nn.Linear | Conv1D):
        return f"adapts a {type(module.base_layer).__name__}"
    if list(module.lora_A) != [ADAPTER] or list(module.active_adapters) != [ADAPTER]:
        return f"has the adapters {', '.join(module.lora_A)}, of which {', '.join(module.active_adapters)} are active"
    if module.merged or module.disable_adapters:
        return "has its adapter merged or turned off"
    if module.use_dora.get(ADAPTER) or module.lora_bias.get(ADAPTER) or module.lora_variant.get(ADAPTER) is not None:
        return "has a variant of LoRA (DoRA, a bias …)"
    return None


def add_adapters(model: nn.Module, lora: Lora) -> Any:
    """Give projections of a stock model adapters, and freeze all else but what trains in full; returns peft's
    configuration of them."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InvalidInput("lora: needs peft, which is not installed; install galvatron[lora]") from None
    targets: Any = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    conv = any(isinstance(module, Conv1D) for module in model.modules())
    alpha: Any = lora.alpha
    whole = [name for name, own in model.named_parameters() if lora.trains(name)]
    _check_full(lora, model)
    ends = "|".join(map(re.escape, lora.full or ()))
    left_out = rf".*({ends})(\..*)?" if ends else None
    config = LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=targets, fan_in_fan_out=conv, exclude_modules=left_out
    )
    if targets == ALL_LINEAR:
        _leave_experts_out(config, model)
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        apart = f" beside {', '.join(lora.full)} that train in full" if lora.full else ""
        raise InvalidInput(f"lora-targets: {', '.join(lora.targets)} given{apart}, but peft says: {error}") from None
    for name in whole:
        model.get_parameter(name).requires_grad_()
    adapted: Any = without_peft(model)
    made = adapted.peft_config[ADAPTER]
    made.exclude_modules, made.modules_to_save = None, list(lora.full or ()) or None
    if not isinstance(made.target_modules, str):
        made.target_modules = {own for own in made.target_modules if not lora.trains(f"{own}.weight")}
    return made


def decided(lora: Lora, model: nn.Module) -> Lora:
    """The same, with the modules that train in full where nobody has said which: the head of a classifier."""
    if lora.full is not None:
        return lora
    heads = next((own for part, own in _HEADS.items() if type(model).__name__.endswith(part)), ())
    present = {own for own in heads for name, _ in model.named_parameters() if is_within(name, (own,))}
    return replace(lora, full=tuple(sorted(present)))


def trains_head(lora: Lora, model: nn.Module) -> bool:
    """Whether all of what peft takes for the head of a classifier trains in full."""
    heads = tuple(own for heads in _HEADS.values() for own in heads)
    return all(lora.trains(name) for name, _ in model.named_parameters() if is_within(name, heads))


def _check_full(lora: Lora, model: nn.Module) -> None:
    fitting: dict[str, list[str]] = {own: [] for own in lora.full or ()}
    for names in all_names(model).values():
        for own, found in fitting.items():
            fits = [name for name in names if is_within(name, (own,))]
            found += fits
            if fits and len(names) > 1:
                others = ", ".join(name for name in names if name not in fits[:1])
                raise InvalidInput(
                    f"lora-full: {own!r} given, but {fits[0]} is tied to {others}, which peft would load apart; leave "
                    "it out, or untie them in the configuration (tie_word_embeddings)"
                )
    heads = _HEADS["Classification"]
    for own, found in fitting.items():
        # peft's configurations of classifiers have both names of heads.
        if not found and not (own in heads and any(fitting.get(other) for other in heads)):
            raise InvalidInput(
                f"lora-full: {own!r} fits no module of {type(model).__name__} that has parameters; expected ends of "
                "names of modules, such as classifier"
            )


def _leave_experts_out(config: Any, model: nn.Module) -> None:
    """Of a mixture of experts peft takes "all-linear" to mean experts and router, too, which are no projections in
    transformers 5. peft goes by the last part of names, so that a dense MLP or a shared expert whose projections are
    called as those of experts gets no adapter either."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older peft, to which linear layers alone are linear
        return
    convert_peft_config_for_transformers(config, model, None)
    if config.target_parameters:
        config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}


def lora_of(model: nn.Module) -> Lora | None:
    """The adapters of a model as we say it; None: it has none. Raises :class:`InvalidInput` if projections differ."""
    found = {name: adapter for name, module in model.named_modules() if (adapter := adapter_of(module)) is not None}
    if not found:
        return None
    ranks = {adapter.down.out_features for adapter in found.values()}
    scalings = {adapter.scaling for adapter in found.values()}
    if len(ranks) > 1 or len(scalings) > 1:
        raise InvalidInput(
            f"peft: adapters of different ranks {sorted(ranks)} or scalings {sorted(scalings)}; expected one rank and "
            "one alpha for all"
        )
    (rank,), (scaling,) = ranks, scalings
    ends = sorted({name.rpartition(".")[2] for name in found})
    fitting = {
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ends and (name in found or isinstance(module, nn.Linear | Conv1D))
    }
    targets = ends if fitting == found.keys() else sorted(found)
    return Lora(rank=rank, alpha=scaling * rank, targets=tuple(targets), full=_full(model))
