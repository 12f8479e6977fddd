"""Conventions of the system that runs the plan, where they change what a layer costs.

The paper's runs used the systems of 2022 (DDP, FairScale FSDP, GPipe); ours uses FSDP2 with prefetching. FairScale's
flat gather buffers are of a size that nothing else can use, so that the largest stays with the allocator and serves the
other layers; GPipe's copy streams free a micro-batch's tensors only when the next one is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONVENTIONS", "DISTRIBUTED_OPTIMIZER", "GALVATRON", "PAPER_SYSTEMS", "Conventions", "working_sets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """How the running system behaves."""

    name: str
    gather_ahead: bool
    """Whether SDP gathers the next layer's parameters beside forward computation (else forward waits for them)."""
    sdp_buffers_in_backward: bool
    """Whether SDP takes memory beside shards while a layer runs backward, as FSDP2 does: its gathered parameters and
    its whole gradient, which is reduced in fp32."""
    layers_prefetched: int
    """Where it does, layers whose parameters are gathered ahead of the one that runs backward."""
    shared_stay_gathered: bool
    """Whether SDP keeps weights that later layers use gathered, from their first use to their last."""
    late_gradients: bool
    """Whether the place of a gradient is made only when the first micro-batch's is there."""
    largest_layers_kept: int
    """Under SDP, gather buffers as large as the model's largest layer that the allocator keeps all the time."""
    pipeline_transients: int
    """Micro-batches whose working sets a pipeline's stage holds at once (no more than there are)."""
    whole_tensors_in_tp: bool
    """Whether a layer's backward under TP counts the boundary tensors that are whole on each rank, and what a profile
    measured of it; the paper's figures are fitted without."""
    prices_resplits: bool
    """Whether a layer pays to use it a tied weight that its owner splits otherwise; else all are held to split it
    alike."""
    counts_rows: bool
    """Whether Slice-Gather of a micro-batch with too few rows gathers it whole; the paper's prices know no rows."""
    distributed_optimizer: bool = False
    """Whether ZeRO-2 is ZeRO-1 as Megatron's distributed optimizer and DeepSpeed have it: optimizer states are divided,
    those of experts over their DP too; gradients stay whole, and are reduced once an iteration."""


GALVATRON = Conventions(
    name="galvatron",
    gather_ahead=True,
    sdp_buffers_in_backward=True,
    layers_prefetched=1,
    shared_stay_gathered=True,
    late_gradients=True,
    largest_layers_kept=0,
    pipeline_transients=1,
    whole_tensors_in_tp=True,
    prices_resplits=True,
    counts_rows=True,
)
PAPER_SYSTEMS = Conventions(
    name="paper",
    gather_ahead=False,
    sdp_buffers_in_backward=False,
    layers_prefetched=0,
    shared_stay_gathered=False,
    late_gradients=False,
    largest_layers_kept=1,
    pipeline_transients=2,
    whole_tensors_in_tp=False,
    prices_resplits=False,
    counts_rows=False,
)
CONVENTIONS = (GALVATRON, PAPER_SYSTEMS)
"""Those of plans that are run or compared; files name them."""
DISTRIBUTED_OPTIMIZER = replace(
    GALVATRON, name="distributed-optimizer", late_gradients=False, distributed_optimizer=True
)
"""For layouts of other systems (:mod:`galvatron.planner.exchange`); their gradients have a place from the start."""


def working_sets(micro_batches: NDArray[np.int64], conventions: Conventions, *, pipelined: bool) -> NDArray[np.int64]:
    """Micro-batches whose working sets are alive at once: one without a pipeline."""
    return np.minimum(micro_batches, conventions.pipeline_transients) if pipelined else np.ones_like(micro_batches)
