"""The loss of a batch while it is still on its way from the last stage."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["Loss"]


class Loss:
    """A number that may still be under way: ``float(loss)``, ``loss.item()`` and formatting wait for it.

    No tensor, because PyTorch would let a program read one before it is there. The first stages compute on while the
    last ones could already update their weights, so it is best read after the optimizer's step.
    """

    def __init__(self, total: Tensor, work: dist.Work | None) -> None:
        """``work``: the sum over ranks that ``total`` is part of."""
        self._total, self._work = total, work

    def tensor(self) -> Tensor:
        """The value as a tensor on the model's device; computing with it waits on the device, not here."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total

    def item(self) -> float:
        return float(self.tensor())

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"Loss({self.item()})"
