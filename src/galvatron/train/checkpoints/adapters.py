"""Low-rank adapters on their way out: merged into the weights beside them, or alone in peft's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.core.spec.tuning import Lora
from galvatron.families.build import build_meta
from galvatron.families.lora import add_adapters, is_adapter, plain_name, trains_head

__all__ = ["is_exported", "lora_of_plan", "merged", "merged_shapes", "write_adapters"]

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""peft's names of tasks, by how the stock class's name ends."""


_Outline = TypeVar("_Outline")


def lora_of_plan(plan: Mapping[str, Any]) -> Lora | None:
    """The adapters that a plan, as its file has it, was made for."""
    found = plan["model"]["training"].get("lora")
    if found is None:
        return None
    full = found.get("full")
    return Lora(**{**found, "targets": tuple(found["targets"]), "full": None if full is None else tuple(full)})


def is_exported(name: str, lora: Lora | None) -> bool:
    """Whether a parameter is written where adapters alone are: theirs, and those of modules that train in full."""
    return is_adapter(name) or (lora is not None and lora.trains(name))


def merged_shapes(outlines: Mapping[str, _Outline]) -> dict[str, _Outline]:
    """Shapes, or what else there is, of the stock model's parameters, from those of one with adapters."""
    return {plain_name(name): own for name, own in outlines.items() if not is_adapter(name)}


def merged(tensors: Iterable[tuple[str, Tensor]], lora: Lora, stock: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The stock model's parameters, each adapter added to its weight: W + alpha / rank · B A. ``tensors``: in the
    model's order, in which an adapter follows its projection."""
    for module, group in groupby(tensors, key=lambda each: _projection(each[0])):
        own = dict(group)
        parts = {name: tensor for name, tensor in own.items() if is_adapter(name)}
        if parts:
            down, up = (parts[f"{module}.lora_{letter}.default.weight"].double() for letter in "AB")
            weight = own[f"{module}.base_layer.weight"]
            added = lora.alpha / lora.rank * (up @ down)
            if isinstance(stock.get_submodule(module), Conv1D):
                added = added.t()
            wide = torch.promote_types(weight.dtype, parts[f"{module}.lora_A.default.weight"].dtype)
            own[f"{module}.base_layer.weight"] = (weight.double() + added.to(weight.device)).to(wide)
        for name, tensor in own.items():
            if not is_adapter(name):
                yield plain_name(name), tensor


def _projection(name: str) -> str:
    """The module that a parameter belongs to, of an adapter and of the weight beside it the same."""
    for part in (".base_layer.", ".lora_A.", ".lora_B."):
        if part in name:
            return name.partition(part)[0]
    return name


def write_adapters(
    plan: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], out: Path, base: Path | None = None
) -> None:
    """Write adapters to a new folder that ``PeftModel.from_pretrained`` loads. ``base``: the folder of the model that
    they were trained on, where ``AutoPeftModel`` looks for it."""
    lora, model = lora_of_plan(plan), plan["model"]
    if lora is None:
        raise InvalidInput(f"adapters: {model['name']} was trained without; export the whole model")
    if model["config"] is None:
        raise InvalidInput(f"adapters: {model['name']} has no configuration in its plan, so nobody could load them")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out}: exists and is not empty; give the name of a new folder")
    stock = build_meta(model["config"], Training(attention=Attention.EAGER), as_named=model["family"] == "generic")
    config = add_adapters(stock, lora)
    task = next((task for end, task in _TASKS.items() if type(stock).__name__.endswith(end)), None)
    config.task_type = task if trains_head(lora, stock) else None  # or peft would look for a head in the file
    config.inference_mode = True
    config.base_model_name_or_path = model["config"].get("_name_or_path") or None
    if base is not None:
        config.base_model_name_or_path = str(base.resolve() if base.is_dir() else base)
    found = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().to("cpu").contiguous()
        for name, tensor in tensors
        if is_exported(name, lora)
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_file(found, out / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(out))  # last, so that a folder that is not complete does not look like one
    except OSError as error:
        raise InvalidInput(f"{out}: cannot be written ({error.strerror or error})") from error
