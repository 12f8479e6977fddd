"""How a rank computes: what every part of the runtime is told once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ComputeSettings"]


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Device, types and seed of a rank, and how its products and blocks are computed."""

    device: torch.device
    dtype: torch.dtype
    """Of activations and working parameters."""
    master_dtype: torch.dtype
    """Of masters, gradients' sums and optimizer states."""
    seed: int
    """Of random numbers."""
    buffers_follow: bool = False
    """Whether buffers have the type of activations; else they are as the model has them."""
    compile: bool = False
    """Whether the blocks' computation is compiled."""
    tf32: bool | None = None
    """Whether matrix products of fp32 tensors are computed in TF32; None: as the process has it."""

    def held_dtype(self, *, trained: bool) -> torch.dtype:
        """Of what a rank holds of a parameter: nothing is added to a frozen one, so that it needs no wider master."""
        return self.master_dtype if trained else self.dtype
