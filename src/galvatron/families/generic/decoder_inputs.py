"""What a decoder reads: Hugging Face's models make it from the labels, inside their forward. Parts of the forward run
without labels, so it is made here by the stock model's own function, which a trial run finds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import Call, Held, Stop, StubbedModel
from galvatron.families.layer import IGNORED, Batch

__all__ = ["DecoderInputs"]

_IDS = "decoder_input_ids"


class DecoderInputs:
    """Completes batches with the decoder's inputs, where the model takes some and a batch has none."""

    def __init__(self, model: nn.Module, example: Batch) -> None:
        taken = inspect.signature(model.forward).parameters
        needed = _IDS in taken and "labels" in taken and _IDS not in example and "labels" in example
        self._model = model
        self._functions = [own for own in _functions(model) if _works(own, example["labels"])] if needed else []
        self._needed = needed

    def complete(self, batch: Batch) -> Batch:
        """The batch with the decoder's inputs."""
        if not self._functions or _IDS in batch or "labels" not in batch:
            return batch
        return {**batch, _IDS: self._functions[0](batch["labels"])}

    def prove(self, anatomy: Anatomy, example: Batch) -> None:
        """Keep the function with which all modules are given the tokens that the model's forward makes of labels; none,
        if it does not look at them."""
        if not self._needed:
            return
        labels = example["labels"].clone()
        labels[0, -1] = IGNORED  # which is no token: the function must say which one it becomes
        inputs = {name: own for name, own in anatomy.pick(example).items() if name != _IDS}
        expected = _tokens_seen(self._model, anatomy, {**inputs, "labels": labels})
        for function in self._functions:
            if _equal(_tokens_seen(self._model, anatomy, {**inputs, _IDS: function(labels)}), expected):
                self._functions = [function]
                return
        self._functions = []
        if not _equal(_tokens_seen(self._model, anatomy, inputs), expected):
            raise InvalidInput(
                f"{type(self._model).__name__}: how it makes {_IDS} from labels is not known; give an example batch "
                f"that has {_IDS}"
            )


def _works(function: Callable[[Tensor], Tensor], labels: Tensor) -> bool:
    try:
        return isinstance(function(labels), Tensor)
    except Exception:  # of whatever kind: it is the stock model's own
        return False


def _functions(model: Any) -> list[Callable[[Tensor], Tensor]]:
    """Those that the stock model and its module have for it."""
    names = ("prepare_decoder_input_ids_from_labels", "_shift_right")
    found: list[Callable[[Tensor], Tensor]] = [getattr(model, name) for name in names if hasattr(model, name)]
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is not None:
        tokens = [getattr(model.config, name, None) for name in ("pad_token_id", "decoder_start_token_id")]
        tokens = tokens[: len(inspect.signature(shift).parameters) - 1]
        found.append(lambda labels: shift(labels, *tokens))
    return found


def _tokens_seen(model: nn.Module, anatomy: Anatomy, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All whole numbers that modules are given before the decoder's blocks."""
    stubbed = StubbedModel(model, anatomy.lists, anatomy.units)
    seen: list[Tensor] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = (own for own in tree_flatten((args, kwargs))[0] if isinstance(own, Tensor))
        seen.extend(own for own in given if own.dtype == torch.int64)

    def pass_on(call: Call) -> Any:
        if call.block == anatomy.segments[-1].first:
            raise Stop
        return anatomy.passed(call)

    for unit in anatomy.units:
        if isinstance(unit.module, Held):
            continue
        stubbed.model.get_submodule(unit.name).register_forward_pre_hook(note, with_kwargs=True)
    stubbed.on_block = pass_on
    with torch.no_grad():
        stubbed.run(inputs, torch.float32, training=False)
    return seen


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(*pair) for pair in zip(some, others, strict=True))
