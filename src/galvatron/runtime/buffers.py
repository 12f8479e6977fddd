"""Persistent buffers of a model: what its checkpoints hold besides parameters (the bias of a router's scores, say).

No optimizer changes them and no plan divides them: every rank has them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import Layer, LayeredModel
from galvatron.families.weights import persistent_buffers
from galvatron.runtime import collectives

__all__ = ["Buffers"]


class Buffers:
    """The buffers of a model on one rank."""

    def __init__(self, layered: LayeredModel, layers: Sequence[Layer]) -> None:
        """``layers``: those that this rank runs, as they run."""
        self._layered, self._layers = layered, tuple(layers)
        self.names: tuple[str, ...] = tuple(persistent_buffers(layered.model))
        """In the stock model, in its order."""
        self._fixed = frozenset(_fixed(layered.model))
        self._before: dict[str, Tensor] = {}

    def values(self) -> Mapping[str, Tensor]:
        """What each is now, on the CPU. Stock models do not change them in training, so all ranks have the same."""
        return {name: own.detach().cpu() for name, own in persistent_buffers(self._layered.model).items()}

    def remember(self) -> None:
        """What they are now, before a first batch."""
        self._before = {name: own.clone() for name, own in self._running() if name in self._fixed and not own.is_meta}

    def check(self, device: torch.device, *, once: bool) -> None:
        """Raise :class:`InvalidInput` on all ranks if forward has changed some since by the rows of each rank, or not
        ``once`` in an iteration, as one process does. Call it on all ranks."""
        if not self._fixed:
            return
        before, self._before = self._before, {}
        running = ((name, own) for name, own in self._running() if name in before and not own.is_meta)
        changed = {name: own.detach().cpu() for name, own in running if not torch.equal(own, before[name])}
        given = collectives.all_gather_object(changed, device)
        first = {name: own for known in reversed(given) for name, own in known.items()}
        same = all(torch.equal(own, first[name]) for known in given for name, own in known.items())
        if first and not (same and once):
            raise InvalidInput(
                f"{type(self._layered.model).__name__}: forward changes its buffer {min(first)}, as BatchNorm "
                "does its statistics, for the rows of a rank or of a micro-batch instead of the batch's; such a model "
                "cannot be divided and stay the same"
            )

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        """Give buffers other values, wherever they are used."""
        places = [*self._layered.model.named_buffers(remove_duplicate=False), *self._running()]
        for name, own in places:
            if name in values and not own.is_meta:
                own.copy_(values[name])

    def _running(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._layered.shared_buffers()
        for layer in self._layers:
            yield from layer.stock_buffers()


def _fixed(model: nn.Module) -> Iterator[str]:
    """Those that may not change: all but what transformers' own modules have at hand (rotations of long sequences)."""
    for name, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            stock = type(module).__module__.startswith("transformers.")
            if not stock or key not in module._non_persistent_buffers_set:
                yield f"{name}.{key}".lstrip(".")
