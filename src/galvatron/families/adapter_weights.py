"""Weights of a model with adapters, some of them from a folder as peft writes it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import parse, read_text
from galvatron.core.spec.tuning import Lora
from galvatron.families.layer import LayeredModel
from galvatron.families.lora import ADAPTER, is_adapter, plain_name
from galvatron.families.weights import Weights

__all__ = ["AdaptedWeights", "adapter_lora"]

_FILE = "adapter_model.safetensors"


class AdaptedWeights:
    """Weights of a model with adapters: of the stock model from one source, of adapters from a folder as peft writes
    it, or as peft starts them: A as a linear layer, drawn from (seed, name) alone, B zero."""

    def __init__(
        self, layered: LayeredModel, plain: LayeredModel, base: Weights, seed: int, folder: Path | None = None
    ) -> None:
        """``layered``: the model with adapters, all else frozen but what trains in full; ``plain``: without; ``base``:
        the weights of that."""
        self._base, self._seed = base, seed
        self._trained = {
            layer.stock_name(name)
            for layer in layered.layers
            for name, own in layer.named_parameters()
            if own.requires_grad
        }
        self._plain = [{layer.stock_name(name): name for name, _ in layer.named_parameters()} for layer in plain.layers]
        self._layers = [
            {name: (layer.stock_name(name), tuple(own.shape)) for name, own in layer.named_parameters()}
            for layer in layered.layers
        ]
        self._saved = None if folder is None else _saved(folder, self._names())

    def _names(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for layer in self._layers for name, shape in layer.values() if name in self._trained}

    def tensors(self, index: int) -> dict[str, Tensor]:
        base, names = self._base.tensors(index), self._plain[index]
        return {
            name: self._adapter(stock, shape) if is_adapter(stock) else self._own(stock, base[names[plain_name(stock)]])
            for name, (stock, shape) in self._layers[index].items()
        }

    def _own(self, name: str, base: Tensor) -> Tensor:
        return base if self._saved is None or name not in self._trained else self._saved[name].to(torch.float32)

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
        for name in ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern"):
            if content.get(name):
                raise InvalidInput(f"{path}: {name} is {content[name]!r}; expected plain LoRA of one rank")
        names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        full = tuple(content.get("modules_to_save") or ())
        return Lora(rank=content["r"], alpha=content["lora_alpha"], targets=names, full=full)
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
                    name = name.replace(f"{part}weight", f"{part}{ADAPTER}.weight")
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
