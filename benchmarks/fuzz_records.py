"""What a training of ``fuzz_training.py`` leaves, and how two of them differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Record", "difference"]

_CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
"""Stock models compute norms in fp32 inside, which other orders of sums move by rounding."""
_STEPS_CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Record:
    """Gradients of the first step, and parameters after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def difference(ours: Record, theirs: Record, noise: float) -> str | None:
    """``noise``: times the usual rounding."""
    close: dict[str, Any] = {
        "rtol": 1e-5,
        "atol": 1e-6,
        "equal_nan": True,
    }  # rows of padding alone, where stock has NaN
    for what, mine, other in (("losses", ours.losses, theirs.losses), ("norms", ours.norms, theirs.norms)):
        if len(mine) != len(other) or not torch.allclose(torch.tensor(mine), torch.tensor(other), **close):
            return f"{what} {mine}, expected {other}"
    for what, found, whole, tolerance in (
        ("gradient", ours.gradients, theirs.gradients, _CLOSE),
        ("value", ours.parameters, theirs.parameters, _STEPS_CLOSE),
    ):
        for name, own in found.items():
            scale = whole[name].abs().max().clamp(min=1.0)
            wide = {**tolerance, "atol": noise * tolerance["atol"], "equal_nan": True}
            if not torch.allclose(own / scale, whole[name] / scale, **wide):
                return f"{what} of {name} off by {(own - whole[name]).abs().max():.1e} of {scale:.1e}"
    return None
