"""Numbers on their way from the device to this process."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Figures"]


class Figures:
    """Some numbers that the device is still computing. They are sent at once, so that whoever reads them waits for them
    alone, and not for what the device is told to do after them."""

    def __init__(self, *figures: Tensor) -> None:
        self._numbers = torch.stack([figure.detach().double() for figure in figures])
        self._there: torch.cuda.Event | None = None
        if self._numbers.is_cuda:
            sent = torch.empty(self._numbers.shape, dtype=self._numbers.dtype, pin_memory=True)
            self._numbers = sent.copy_(self._numbers, non_blocking=True)
            self._there = torch.cuda.Event(blocking=True)  # whoever waits leaves the core to others
            self._there.record()

    def read(self) -> list[float]:
        """The numbers, in their order."""
        if self._there is not None:
            self._there.synchronize()
        return [float(number) for number in self._numbers.tolist()]
