"""What the paper's setting (``--paper``) means where the paper does not say it."""

from __future__ import annotations

from galvatron.core.spec import Device, Precision

__all__ = ["PAPER_MICRO_BATCHES", "paper_precision", "paper_stages_a_micro_batch"]

PAPER_MICRO_BATCHES = 4
"""Most micro-batches in the paper's setting (fitted to its table): it tuned them by hand and does not say how many."""
_STAGES = 2
"""Stages for each micro-batch of deeper pipelines: as on 8 devices, where there were 4 for 8 stages."""


def paper_stages_a_micro_batch(devices: int) -> int | None:
    """For how many stages pipelines have one micro-batch; None: none of so many devices is deep enough for more than
    :data:`PAPER_MICRO_BATCHES`."""
    return _STAGES if devices // _STAGES > PAPER_MICRO_BATCHES else None


def paper_precision(given: str | None, device: Device | None) -> Precision:
    """PyTorch of those years multiplied fp32 tensors in TF32 unless told otherwise, where a GPU has it."""
    if given is not None:
        return Precision(given)
    return Precision.FP32 if device is None or device.tf32_flops_per_s is None else Precision.TF32
