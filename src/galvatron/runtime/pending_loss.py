"""The loss of an iteration, which may still be under way when the user gets it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from galvatron.core.errors import InvalidInput
from galvatron.runtime.collectives import finish
from galvatron.runtime.same_batches import Marks

__all__ = ["PendingLoss"]


class PendingLoss:
    """A number that may still be under way: ``float(loss)``, ``loss.item()``, formatting and arithmetic wait for it.

    No tensor, because PyTorch would let a program read one before it is there. The first stages compute on while the
    last ones could already update their weights, so it is best read after the optimizer's step. PyTorch's functions and
    a tensor's methods read it, too.
    """

    def __init__(self, totals: Tensor, work: dist.Work | None, marks: Marks | None = None) -> None:
        """``totals``: the loss, and what else is summed with it; ``work``: the sum over ranks that they are part of;
        ``marks``: whose sums are the last two of the totals, and show whether all ranks were given the same labels."""
        self._totals, self._work, self._marks = totals, work, marks

    def tensor(self) -> Tensor:
        """The value as a tensor on the model's device; computing with it waits on the device, not here. NaN if ranks
        were given different labels, of which :meth:`item` says more."""
        totals = self._summed()
        value = totals.reshape(-1)[0]
        return value if self._marks is None else torch.where(self._marks.differ(*totals[-2:]), torch.nan, value)

    def others(self) -> list[float]:
        """What else was summed."""
        return [float(value) for value in self._checked()[1:].tolist()]

    def _summed(self) -> Tensor:
        if self._work is not None:
            finish([self._work])
            self._work = None
        return self._totals

    def _checked(self) -> Tensor:
        totals = self._summed()
        if self._marks is not None:
            marks, self._marks, self._totals = self._marks, None, totals[:-2]
            marks.check(*totals[-2:].cpu())
        return self._totals

    def item(self) -> float:
        return float(self._checked().reshape(-1)[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'PendingLoss' object has no attribute {name!r}; .tensor() has the value as a tensor")
        return getattr(self._scalar(), name)

    def _scalar(self) -> Tensor:
        """The value on the CPU, where it goes with tensors of any device."""
        return torch.tensor(self.item(), dtype=torch.float64)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch where one of its functions is given such a loss."""
        args, kwargs = tree_map_only(PendingLoss, PendingLoss._scalar, (args, kwargs or {}))
        return function(*args, **kwargs)

    def detach(self) -> PendingLoss:
        """Itself: it has no gradient."""
        return self

    def backward(self, *_: Any, **__: Any) -> None:
        """There is none to run: :meth:`ParallelModel.forward_backward` has done it."""
        raise InvalidInput(
            "loss.backward(): forward_backward has run backward already, and gradients are complete; leave it out"
        )

    def __float__(self) -> float:
        return self.item()

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.item(), dtype)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"PendingLoss({self.item()})"

    # As a number

    def __eq__(self, other: object) -> bool:
        return self.item() == (other.item() if isinstance(other, PendingLoss) else other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.item())

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)

    def __abs__(self) -> float:
        return abs(self.item())

    def __neg__(self) -> float:
        return -self.item()

    def __add__(self, other: Any) -> Any:
        return self.item() + _number(other)

    def __sub__(self, other: Any) -> Any:
        return self.item() - _number(other)

    def __mul__(self, other: Any) -> Any:
        return self.item() * _number(other)

    def __truediv__(self, other: Any) -> Any:
        return self.item() / _number(other)

    def __floordiv__(self, other: Any) -> Any:
        return self.item() // _number(other)

    def __mod__(self, other: Any) -> Any:
        return self.item() % _number(other)

    def __pow__(self, other: Any) -> Any:
        return self.item() ** _number(other)

    def __radd__(self, other: Any) -> Any:
        return other + self.item()

    def __rsub__(self, other: Any) -> Any:
        return other - self.item()

    def __rmul__(self, other: Any) -> Any:
        return other * self.item()

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.item()

    def __rpow__(self, other: Any) -> Any:
        return other ** self.item()

    def __lt__(self, other: Any) -> bool:
        return bool(self.item() < _number(other))

    def __le__(self, other: Any) -> bool:
        return bool(self.item() <= _number(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.item() > _number(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self.item() >= _number(other))


def _number(other: Any) -> Any:
    return other.item() if isinstance(other, PendingLoss) else other
