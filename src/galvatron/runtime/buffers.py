"""Persistent buffers of a model: what its checkpoints hold besides parameters (the bias of a router's scores, say).

No optimizer changes them and no plan divides them: every rank has them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from galvatron.families.layer import Layer, LayeredModel
from galvatron.families.weights import persistent_buffers

__all__ = ["Buffers"]


class Buffers:
    """The buffers of a model on one rank."""

    def __init__(self, layered: LayeredModel, layers: Sequence[Layer]) -> None:
        """``layers``: those that this rank runs, as they run."""
        self._layered, self._layers = layered, tuple(layers)
        self.names: tuple[str, ...] = tuple(persistent_buffers(layered.model))
        """In the stock model, in its order."""

    def values(self) -> Mapping[str, Tensor]:
        """What each is now, on the CPU. Stock models do not change them in training, so all ranks have the same."""
        return {name: own.detach().cpu() for name, own in persistent_buffers(self._layered.model).items()}

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
