"""Low-rank adapters in peft's form: which projections of a model have one, and where their first values come from.

The modules are peft's own: a projection is wrapped, its weight is ``base_layer.weight``, and ``lora_A`` and ``lora_B``
stand beside it. peft is an extra: what only reads models that have no adapters does not import it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import parse, read_text
from galvatron.core.spec.tuning import ALL_LINEAR, Lora
from galvatron.families.layer import LayeredModel
from galvatron.families.weights import Weights

__all__ = [
    "AdaptedWeights",
    "Adapter",
    "adapter_lora",
    "adapter_of",
    "add_adapters",
    "has_adapters",
    "is_adapter",
    "lora_of",
    "plain_name",
    "scale_at_rank",
    "without_adapter",
    "without_peft",
]

_NAME = "default"
_FILE = "adapter_model.safetensors"
_BASE = ".base_layer."


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
    return Adapter(lora.lora_A[_NAME], lora.lora_B[_NAME], float(lora.scaling[_NAME]))


def scale_at_rank(layer: nn.Module) -> None:
    """Let the adapters of a layer be scaled where they are narrow. peft scales their wide results, and so the gradients
    of these: two passes over memory for each projection, which keep compilers from adding within the product, too."""
    for module in layer.modules():
        if adapter_of(module) is not None:
            module.forward = MethodType(_adapted, module)


def _adapted(module: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """W x + B (scaling · A x)."""
    own = Adapter(module.lora_A[_NAME], module.lora_B[_NAME], module.scaling[_NAME])
    result: Tensor = module.base_layer(tensor, *args, **kwargs)
    low: Tensor = own.down(module.lora_dropout[_NAME](tensor.to(own.down.weight.dtype)))
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
    base = model.get_base_model() if hasattr(model, "get_base_model") and hasattr(model, "peft_config") else model
    for name, module in base.named_modules():
        kind = type(module)
        if not kind.__module__.startswith("peft.") or name.endswith(tuple(_INSIDE)):
            continue
        reason = _unusable(module) if hasattr(module, "lora_A") else f"is peft's {kind.__name__}"
        if reason is not None:
            raise InvalidInput(
                f"peft: {name} {reason}; expected LoRA on linear projections with one adapter named {_NAME!r}, "
                "not merged, without DoRA, bias and modules_to_save"
            )
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is not None and adapter_of(head) is not None:
        raise InvalidInput("peft: the head has an adapter, which cannot be run; leave it out of target_modules")
    _check_trained(base)
    return base


def _check_trained(model: nn.Module) -> None:
    """Of a model with adapters these train, and nothing else: plans freeze the rest, and exports leave it out."""
    flags = {name: own.requires_grad for name, own in model.named_parameters() if is_adapter(name)}
    if not flags:
        return
    also = next((name for name, own in model.named_parameters() if own.requires_grad and name not in flags), None)
    if also is not None:
        raise InvalidInput(
            f"peft: {plain_name(also)} trains beside the adapters, which cannot be run; freeze it "
            '(requires_grad_(False); in LoraConfig, bias="none")'
        )
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
    if list(module.lora_A) != [_NAME] or list(module.active_adapters) != [_NAME]:
        return f"has the adapters {', '.join(module.lora_A)}, of which {', '.join(module.active_adapters)} are active"
    if module.merged or module.disable_adapters:
        return "has its adapter merged or turned off"
    if module.use_dora.get(_NAME) or module.lora_bias.get(_NAME) or module.lora_variant.get(_NAME) is not None:
        return "has a variant of LoRA (DoRA, a bias …)"
    return None


def add_adapters(model: nn.Module, lora: Lora) -> Any:
    """Give projections of a stock model adapters, and freeze all else; returns peft's configuration of them."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InvalidInput("lora: needs peft, which is not installed; install galvatron[lora]") from None
    targets: Any = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    conv = any(isinstance(module, Conv1D) for module in model.modules())
    alpha: Any = lora.alpha
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets, fan_in_fan_out=conv)
    if targets == ALL_LINEAR:
        _leave_experts_out(config, model)
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise InvalidInput(f"lora-targets: {', '.join(lora.targets)} given, but peft says: {error}") from None
    adapted: Any = without_peft(model)
    return adapted.peft_config[_NAME]


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
    return Lora(rank=rank, alpha=scaling * rank, targets=tuple(targets))


class AdaptedWeights:
    """Weights of a model with adapters: of the stock model from one source, of adapters from a folder as peft writes
    it, or as peft starts them: A as a linear layer, drawn from (seed, name) alone, B zero."""

    def __init__(
        self, layered: LayeredModel, plain: LayeredModel, base: Weights, seed: int, folder: Path | None = None
    ) -> None:
        """``layered``: the model with adapters, ``plain``: without; ``base``: the weights of that."""
        self._base, self._seed = base, seed
        self._plain = [{layer.stock_name(name): name for name, _ in layer.named_parameters()} for layer in plain.layers]
        self._layers = [
            {name: (layer.stock_name(name), tuple(own.shape)) for name, own in layer.named_parameters()}
            for layer in layered.layers
        ]
        self._saved = None if folder is None else _saved(folder, self._names())

    def _names(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for layer in self._layers for name, shape in layer.values() if is_adapter(name)}

    def tensors(self, index: int) -> dict[str, Tensor]:
        base, names = self._base.tensors(index), self._plain[index]
        return {
            name: self._adapter(stock, shape) if is_adapter(stock) else base[names[plain_name(stock)]]
            for name, (stock, shape) in self._layers[index].items()
        }

    def _adapter(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._saved is not None:
            return self._saved[name].to(torch.float32)
        if ".lora_B." in name:
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = torch.empty(shape)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        return drawn


def adapter_lora(folder: Path) -> Lora:
    """What the configuration of a folder of adapters says."""
    path = folder / "adapter_config.json"
    content = parse(read_text(path, "peft's configuration of LoRA adapters"), str(path), "JSON")
    try:
        targets = content["target_modules"]
        for name in ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"):
            if content.get(name):
                raise InvalidInput(f"{path}: {name} is {content[name]!r}; expected plain LoRA of one rank")
        names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        return Lora(rank=content["r"], alpha=content["lora_alpha"], targets=names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{path}: cannot be read as peft's configuration of LoRA adapters ({error!r})") from None


def _saved(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    path = folder / _FILE
    found: dict[str, Tensor] = {}
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file; expected adapters as peft writes them")
    try:
        with safe_open(path, framework="pt") as file:
            for saved in file.keys():  # noqa: SIM118 (no mapping)
                name = saved.removeprefix("base_model.model.")
                for part in (".lora_A.", ".lora_B."):
                    name = name.replace(f"{part}weight", f"{part}{_NAME}.weight")
                found[name] = file.get_tensor(saved)
    except Exception as error:  # of whatever kind: safetensors has its own
        raise InvalidInput(f"{path}: cannot be read as adapters ({error}); expected what peft writes") from None
    for name in {**found, **expected}:
        shape = tuple(found[name].shape) if name in found else None
        if shape != expected.get(name):
            raise InvalidInput(
                f"{path}: {name} is {shape or 'missing'}; expected {expected.get(name, 'no such adapter')}: rank and "
                "projections must be those of the plan"
            )
    return found
