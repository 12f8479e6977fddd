"""Conventions of the system that runs the plan, where they change what a layer costs.

The paper's runs used the systems of 2022 (DDP, FairScale FSDP, GPipe); ours uses FSDP2 with prefetching.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GALVATRON", "PAPER_SYSTEMS", "Conventions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """How the running system behaves."""

    name: str
    gather_ahead: bool
    """Whether SDP gathers the next layer's parameters beside forward computation (else forward waits for them)."""
    state_padding: float
    """Share of extra memory that SDP needs for flat, padded shards."""
    gathered_layers: int
    """Layers whose gathered parameters are alive at once under SDP: the current one and those prefetched."""

    loss_on_whole_batch: bool
    """Whether a pipeline joins its micro-batches before the loss (PyTorch's GPipe does), so that the last layer's
    transient is that of the whole batch."""


GALVATRON = Conventions(
    name="galvatron", gather_ahead=True, state_padding=0.0, gathered_layers=2, loss_on_whole_batch=False
)
PAPER_SYSTEMS = Conventions(
    name="paper", gather_ahead=False, state_padding=0.025, gathered_layers=1, loss_on_whole_batch=True
)
