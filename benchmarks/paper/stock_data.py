"""Pure DP and SDP as PyTorch itself does them: ``DistributedDataParallel`` and FSDP2's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from galvatron.planner.plan.plan import Plan
from stock import adam, batch_for, plain_step, stock_model

__all__ = ["ddp", "fsdp2"]


def ddp(plan: Plan, device: torch.device) -> Callable[[], Tensor]:
    # Ranks start from one seed, so that there is nothing to make equal first.
    model = DistributedDataParallel(stock_model(plan, device), gradient_as_bucket_view=True, init_sync=False)
    return _training(model, plan, device)


def fsdp2(plan: Plan, device: torch.device) -> Callable[[], Tensor]:
    """One unit a layer, gathered for forward and again for backward; embeddings and head are the root's."""
    model = stock_model(plan, device)
    for unit in _units(model, plan.model.family):
        fully_shard(unit)
    fully_shard(model)
    return _training(model, plan, device)


def _units(model: Any, family: str) -> Iterator[nn.Module]:
    if family == "bert":
        yield from model.bert.encoder.layer
    elif family == "vit":
        yield from model.vit.layers
    elif family == "t5":
        yield from model.encoder.block
        yield from model.decoder.block
    else:
        assert family == "swin"
        for stage in model.swin.encoder.layers:
            yield from stage.blocks
            if stage.downsample is not None:
                yield stage.downsample


def _training(model: nn.Module, plan: Plan, device: torch.device) -> Callable[[], Tensor]:
    rank, each = dist.get_rank(), plan.batch // dist.get_world_size()
    batch = {name: rows[rank * each : (rank + 1) * each].to(device) for name, rows in batch_for(plan).items()}
    return plain_step(model, batch, adam(model.parameters()))
