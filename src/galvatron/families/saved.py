"""Weights from a folder as Hugging Face saves it: safetensors, one file or several with an index.

Only headers are read at first, to check that every parameter is there in its shape; then each layer's tensors when they
are asked for. Names are translated as ``from_pretrained`` does: older names of a family, a base model without its head.
What is saved in another form (each expert by itself) is put together by transformers' own conversion.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import parse, read_text
from galvatron.families.layer import LayeredModel
from galvatron.families.weights import Parameter, parameters_of, persistent_buffers

__all__ = ["SavedWeights", "load_buffers", "saved_names"]

_LOG = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 5
"""Names listed in an error before "and … more"."""


@dataclass(slots=True)
class _Conversion:
    """Saved tensors of which transformers makes parameters of the model."""

    converter: WeightConverter
    first: str
    """The parameter that the first of them belongs to."""
    parts: list[tuple[str, Path, str]] = field(default_factory=list)
    """Pattern of the converter, file and name in it, in the order of their numbers."""

    def convert(self, tensors: Iterable[Tensor], model: Any) -> dict[str, Tensor]:
        """The parameters, from all parts."""
        converter = copy.deepcopy(self.converter)
        for (pattern, _, saved), tensor in zip(self.parts, tensors, strict=True):
            converter.add_tensor(self.first, saved, pattern, tensor)  # takes tensors as well
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: own[0] if isinstance(own, list) else own for name, own in made.items()}


def load_buffers(model: nn.Module, folder: str | Path) -> None:
    """Give a model's persistent buffers the values that a folder has. What the folder lacks stays as the model made it,
    as with ``from_pretrained``, and is named in a warning."""
    buffers = persistent_buffers(model)
    if not buffers:
        return
    rename = _renaming(model)
    missing = dict(buffers)
    for path in _files(Path(folder)):
        for saved, shape in _header(path).items():
            name = rename(saved)[0]
            if name not in missing:
                continue
            own = missing.pop(name)
            if shape != tuple(own.shape):
                raise InvalidInput(
                    f"{folder}: {name} has shape {list(shape)}; expected {list(own.shape)} for this "
                    f"{type(model).__name__}; use the configuration that was saved with the weights"
                )
            for value in _read([(path, saved)]):
                own.copy_(value)
    if missing:
        _LOG.warning("%s: has no %s, which keeps the value that the model starts with", folder, next(iter(missing)))


class SavedWeights:
    """Weights of a cut model from a checkpoint folder."""

    def __init__(self, layered: LayeredModel, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._layers = parameters_of(layered)
        self._model: Any = layered.model
        self._places: dict[str, tuple[Path, str]] = {}
        """File and name in it, by stock name."""
        self._conversions: dict[str, _Conversion] = {}
        """By stock name; several parameters may come from one."""
        shapes: dict[str, tuple[int, ...]] = {}
        saved = {name: (path, shape) for path in _files(self._folder) for name, shape in _header(path).items()}
        rename = _renaming(layered.model)
        for old in sorted(saved, key=dot_natural_key):
            (path, shape), (name, pattern, converter) = saved[old], rename(old)
            if converter is None:
                self._places[name], shapes[name] = (path, old), shape
            else:
                conversion = self._conversions.setdefault(name, _Conversion(converter, name))
                conversion.parts.append((pattern, path, old))
        for conversion in list(self._conversions.values()):
            empty = (torch.empty(saved[old][1], device="meta") for _, _, old in conversion.parts)
            for name, made in self._converted(conversion, empty).items():
                shapes[name] = tuple(made.shape)
                self._conversions[name] = conversion
        self._check(layered, shapes)

    def tensors(self, index: int) -> dict[str, Tensor]:
        by_file: dict[Path, list[tuple[str, str]]] = {}
        tensors: dict[str, Tensor] = {}
        made: dict[str, Tensor] = {}
        for own in self._layers[index]:
            name = self._alias(own)
            if name in self._places:
                path, saved = self._places[name]
                by_file.setdefault(path, []).append((own.name, saved))
                continue
            if name not in made:
                conversion = self._conversions[name]
                made |= self._converted(conversion, _read((path, saved) for _, path, saved in conversion.parts))
            tensors[own.name] = made[name].to(torch.float32)
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(saved).to(torch.float32) for name, saved in names}
        return tensors

    def _converted(self, conversion: _Conversion, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        try:
            return conversion.convert(tensors, self._model)
        except Exception as error:  # of whatever kind: it is transformers' own code
            raise InvalidInput(
                f"{self._folder}: {conversion.first} cannot be made of {conversion.parts[0][2]} and what belongs to it "
                f"({str(error).strip().partition(chr(10))[0]}); load the model with from_pretrained and hand it over "
                "in memory"
            ) from error

    def _alias(self, parameter: Parameter) -> str:
        known = self._places.keys() | self._conversions.keys()
        return next((alias for alias in parameter.aliases if alias in known), parameter.aliases[0])

    def _check(self, layered: LayeredModel, shapes: dict[str, tuple[int, ...]]) -> None:
        kind = type(layered.model).__name__
        missing: dict[str, None] = {}
        for own in (own for layer in self._layers for own in layer):
            name = self._alias(own)
            if name not in shapes:
                missing[name] = None
            elif shapes[name] != tuple(own.shape):
                raise InvalidInput(
                    f"{self._folder}: {name} has shape {list(shapes[name])}; expected {list(own.shape)} for this "
                    f"{kind}; use the configuration that was saved with the weights"
                )
        if missing:
            total = {own.aliases[0] for layer in self._layers for own in layer}
            names = ", ".join([*list(missing)[:_SHOWN], *(["…"] if len(missing) > _SHOWN else [])])
            prefix = f"{getattr(layered.model, 'base_model_prefix', '')}."
            if all(not name.startswith(prefix) for name in missing) and len(missing) < len(total):
                hint = "it seems to hold the base model without this head; save the model with its head"
            else:
                hint = "is it a checkpoint of another model, or of fewer layers?"
            raise InvalidInput(
                f"{self._folder}: {len(missing)} of {len(total)} parameters of {kind} are missing ({names}); {hint}"
            )


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        content = parse(read_text(index, "an index of safetensors files"), str(index), "JSON")
        try:
            names = sorted({str(name) for name in content["weight_map"].values()})
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"{index}: is not an index of safetensors files ({error!r})") from None
        lost = [name for name in names if not (folder / name).is_file()]
        if lost:
            raise InvalidInput(f"{folder}: file {lost[0]} is missing, which {_INDEX} names; copy the folder anew")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such folder; expected one with {_SINGLE} or {_INDEX}")
    raise InvalidInput(
        f"{folder}: has neither {_SINGLE} nor {_INDEX}; expected a folder written by save_pretrained "
        "(weights in another format: load them with from_pretrained and save again)"
    )


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path}: cannot be read as safetensors ({error}); copy the file anew") from None


def _read(places: Iterable[tuple[Path, str]]) -> Iterator[Tensor]:
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for path, saved in places:
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            yield opened[path].get_tensor(saved)


_Renaming = Callable[[str], tuple[str, str, WeightConverter | None]]


def _renaming(model: nn.Module) -> _Renaming:
    """From a name in a checkpoint to the stock model's, as ``from_pretrained`` does it; where the tensor has to be
    converted, with the pattern that it fits and the converter."""
    if not isinstance(model, PreTrainedModel):
        return lambda saved: (saved, "", None)
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    merging = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    names = dict.fromkeys((name for name, _ in model.named_parameters(remove_duplicate=False)), True)
    names |= dict.fromkeys(persistent_buffers(model), True)
    prefix = model.base_model_prefix

    converters = {pattern: entry for entry in merging for pattern in entry.source_patterns}

    def rename(saved: str) -> tuple[str, str, WeightConverter | None]:
        name, pattern = rename_source_key(saved, renamings, merging, prefix, names)
        if name not in names:  # the name of today, which an old rule happens to match
            name, pattern = rename_source_key(saved, [], [], prefix, names)
        return (name, "", None) if pattern is None else (name, pattern, converters[pattern])

    return rename


def saved_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """From the stock model's names to those that ``save_pretrained`` writes, which for some families are older ones."""
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in names}
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(entry, WeightConverter) for entry in conversions):  # ``from_pretrained`` takes today's names too
        return {name: name for name in names}
    marked = {name: torch.tensor(number) for number, name in enumerate(names)}
    return {names[int(mark)]: str(saved) for saved, mark in revert_weight_conversion(model, marked).items()}
