"""Makes the CPU keep for backward what a GPU's kernels keep, so that memory measured there speaks for GPUs.

On the CPU a dropout keeps its mask in the activations' own type where CUDA keeps a byte an element, and attention with
dropout has no fused kernel, so that whole maps are kept. Values differ (attention drops nothing), sizes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["kernels_for"]


@contextmanager
def kernels_for(device: torch.device) -> Iterator[None]:
    """While this is entered, what runs on the device keeps what CUDA would keep."""
    if device.type == "cuda":
        yield
        return
    real: dict[str, Callable[..., Tensor]] = {
        name: getattr(functional, name) for name in ("dropout", "scaled_dot_product_attention")
    }
    attend = real["scaled_dot_product_attention"]

    def without_dropout(*tensors: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return attend(*tensors, **options)

    setattr(functional, "dropout", _dropout)  # noqa: B010
    setattr(functional, "scaled_dot_product_attention", without_dropout)  # noqa: B010
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(functional, name, function)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
