"""Whether a stock model's logits are what its output projection returns, and go into the loss as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import StubbedModel, find_units
from galvatron.families.layer import Batch

__all__ = ["fusible_projection", "is_called"]


def fusible_projection(model: Any, anatomy: Anatomy, batch: Batch) -> str | None:
    """The name of that projection, which can be fused with the loss; None: the model scales or caps its logits, or has
    no such projection. Found by running the model's own forward: it must return the very tensor, unchanged."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    names = {id(module): name for name, module in model.named_modules()}
    if type(found) is not nn.Linear or id(found) not in names:
        return None
    name = names[id(found)]
    if name not in {unit.name for unit in anatomy.units}:
        return None
    stubbed = StubbedModel(model, anatomy.lists, anatomy.units)
    stubbed.noise = torch.Generator().manual_seed(0)
    stubbed.on_block = lambda call: anatomy.returned(call, anatomy.hidden(call))
    made: list[tuple[Tensor, int]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        made.append((output, output._version))

    stubbed.model.get_submodule(name).register_forward_hook(note)
    try:
        with torch.no_grad():
            output = stubbed.run(anatomy.pick(batch), torch.float32, training=False)
    except InvalidInput:
        return None
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    once = len(made) == 1 and logits is made[0][0] and logits._version == made[0][1]
    return name if once else None


def is_called(model: nn.Module, anatomy: Anatomy, batch: Batch, path: str) -> bool:
    """Whether a module runs in the model's forward; some are read by what holds them (MobileBERT's head)."""
    units = find_units(model, anatomy.lists)  # new ones: a unit whose result is known would not run
    stubbed = StubbedModel(model, anatomy.lists, units)
    stubbed.on_block = lambda call: anatomy.returned(call, anatomy.hidden(call))
    calls: list[str] = []
    stubbed.model.get_submodule(path).register_forward_hook(lambda *_: calls.append(path))
    with torch.no_grad():
        stubbed.run(anatomy.pick(batch), torch.float32, training=False)
    return bool(calls)
