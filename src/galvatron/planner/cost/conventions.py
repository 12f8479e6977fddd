"""Conventions of the system that runs the plan, where they change what a layer costs.

The paper's runs used the systems of 2022 (DDP, FairScale FSDP, GPipe); ours uses FSDP2 with prefetching. FairScale's
flat gather buffers are of a size that nothing else can use, so that the largest stays with the allocator and serves the
other layers; GPipe's copy streams free a micro-batch's tensors only when the next one is under way.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONVENTIONS", "GALVATRON", "PAPER_SYSTEMS", "Conventions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """How the running system behaves."""

    name: str
    gather_ahead: bool
    """Whether SDP gathers the next layer's parameters beside forward computation (else forward waits for them)."""
    gathered_copies: int
    """Under SDP, whole copies of a layer's parameters while it runs backward: gathered, and the next one's prefetched;
    with any of them also the layer's whole gradient, in fp32 as it is reduced."""
    largest_layers_kept: int
    """Under SDP, gather buffers as large as the model's largest layer that the allocator keeps all the time."""
    pipeline_transients: int
    """Micro-batches whose working sets a pipeline's stage holds at once (no more than there are)."""
    counts_rows: bool
    """Whether Slice-Gather of a micro-batch with too few rows gathers it whole; the paper's prices know no rows."""


GALVATRON = Conventions(
    name="galvatron",
    gather_ahead=True,
    gathered_copies=2,
    largest_layers_kept=0,
    pipeline_transients=1,
    counts_rows=True,
)
PAPER_SYSTEMS = Conventions(
    name="paper",
    gather_ahead=False,
    gathered_copies=0,
    largest_layers_kept=1,
    pipeline_transients=2,
    counts_rows=False,
)
CONVENTIONS = (GALVATRON, PAPER_SYSTEMS)
