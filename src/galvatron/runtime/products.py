"""Matrix products of fp32 tensors: exact, or with operands rounded to TF32 as GPUs since Ampere can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision

__all__ = ["check_tf32", "has_tf32", "products", "tf32_of"]

_AMPERE = (8, 0)


def has_tf32(device: torch.device) -> bool:
    """Whether a device multiplies in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _AMPERE


def check_tf32(precision: Precision, device: torch.device) -> None:
    """Refuse to train in TF32 where it would quietly be something else."""
    if precision is Precision.TF32 and not has_tf32(device):
        raise InvalidInput(
            f"precision: tf32 is planned, but device {str(device)!r} has no TF32 (NVIDIA GPUs have it since Ampere, "
            "compute capability 8.0); plan with --precision fp32"
        )


def tf32_of(precision: Precision) -> bool | None:
    """What a precision says of products of fp32 tensors; None: nothing, for there are hardly any."""
    return None if precision is Precision.BF16 else precision is Precision.TF32


@contextmanager
def products(*, tf32: bool | None) -> Iterator[None]:
    """Compute them so meanwhile, whatever the process does before and after; None: as the process has it.

    The setting belongs to the process, so that it holds for autograd's threads too.
    """
    if tf32 is None:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        raise InvalidInput(
            "fp32 products: their precision was set through torch.backends, which does not go together with plans; "
            "drop that, and plan with --precision tf32 or fp32"
        ) from None
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
