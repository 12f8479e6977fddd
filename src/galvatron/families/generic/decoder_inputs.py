"""What a decoder reads: Hugging Face's models make it from the labels, inside their forward. Parts of the forward run
without labels, so it is made here by the stock model's own function, which a trial run finds."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import Call, Held, Stop, StubbedModel, has_nan
from galvatron.families.layer import IGNORED, Batch

__all__ = ["DecoderInputs", "seen"]

_IDS, _MASK = "decoder_input_ids", "decoder_attention_mask"


@dataclass(frozen=True, slots=True)
class _Shift:
    """Makes the decoder's inputs of a tensor of the batch, with a function of the stock model."""

    source: str
    function: Callable[[Tensor], Tensor]
    padding: int | None
    """The token that the decoder does not attend to; None: it attends to all."""

    def added_to(self, batch: Batch) -> dict[str, Tensor]:
        ids = self.function(batch[self.source].clone())  # some models write into what they are given
        masks = {} if self.padding is None else {_MASK: (ids != self.padding).to(ids.dtype)}
        return {_IDS: ids, **masks, **batch}

    def works(self, batch: Batch) -> bool:
        try:
            return isinstance(self.added_to(batch)[_IDS], Tensor)
        except Exception:  # of whatever kind: it is the stock model's own
            return False


class DecoderInputs:
    """Completes batches with the decoder's inputs, where the model takes some and a batch has none."""

    def __init__(self, model: nn.Module, example: Batch) -> None:
        taken = inspect.signature(model.forward).parameters
        self._model = model
        self._shifts: list[_Shift] = []
        if _IDS in taken and "labels" in taken and _IDS not in example:
            padding = getattr(getattr(model, "config", None), "pad_token_id", None) if _MASK in taken else None
            found = [
                _Shift(source, own, left_out)
                for left_out in dict.fromkeys((None, padding))
                for source in ("labels", "input_ids")
                for own in _functions(model)
            ]
            self._shifts = [shift for shift in found if shift.works(example)]

    def complete(self, batch: Batch) -> Batch:
        """The batch with the decoder's inputs."""
        if not self._shifts or _IDS in batch or self._shifts[0].source not in batch:
            return batch
        return self._shifts[0].added_to(batch)

    def prove(self, anatomy: Anatomy, example: Batch) -> None:
        """Keep what gives modules the tokens and masks that the model's own forward gives them, which sees labels."""
        if not self._shifts:
            return
        labels = example["labels"].clone()
        if labels.ndim > 1 and not labels.is_floating_point():
            labels[0, labels.shape[1] // 2] = IGNORED  # which is no token: the function must say which one it becomes
        example = {**example, "labels": labels}
        inputs = anatomy.pick(example)
        expected = seen(self._model, anatomy, {**inputs, "labels": labels})
        for shift in self._shifts:
            if _equal(seen(self._model, anatomy, anatomy.pick(shift.added_to(example))), expected):
                self._shifts = [shift]
                return
        raise InvalidInput(
            f"{type(self._model).__name__}: how it makes {_IDS} from labels is not known; give an example batch that "
            f"has {_IDS}"
        )


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


def seen(model: nn.Module, anatomy: Anatomy, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All whole numbers that modules are given before the decoder's blocks, and what the first of those is given."""
    stubbed = StubbedModel(model, anatomy.lists, anatomy.units)
    seen: list[Tensor] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = (own for own in tree_flatten((args, kwargs))[0] if isinstance(own, Tensor))
        seen.extend(own.clone() for own in given if own.dtype == torch.int64)

    def pass_on(call: Call) -> Any:
        if call.block == anatomy.segments[-1].first:
            given = tree_flatten((call.args, call.kwargs))[0]
            seen.extend(own for own in given if isinstance(own, Tensor) and not has_nan(own))
            raise Stop
        return anatomy.passed(call)

    for unit in anatomy.units:
        if isinstance(unit.module, Held):
            continue
        stubbed.model.get_submodule(unit.name).register_forward_pre_hook(note, with_kwargs=True)
    stubbed.on_block = pass_on
    with torch.no_grad():
        stubbed.run({name: own.clone() for name, own in inputs.items()}, torch.float32, training=False)
    return seen


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two runs gave modules the same."""
    return len(some) == len(others) and all(torch.equal(*pair) for pair in zip(some, others, strict=True))
