"""Pure TP as PyTorch itself does it: ``parallelize_module`` on the stock model, Megatron's scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.plan import Plan
from stock import adam, batch_for, plain_step, stock_model

__all__ = ["dtensor"]


def _whole() -> PrepareModuleInput:
    """So that projections of one input share its gradient's all-reduce."""
    return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))


def dtensor(plan: Plan, device: torch.device) -> Callable[[], Tensor]:
    model = stock_model(plan, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    batch = {name: rows.to(device) for name, rows in batch_for(plan).items()}
    if plan.model.family == "bert":
        return _bert(model, mesh, batch)
    if plan.model.family == "vit":
        return _vit(model, mesh, batch)
    raise InvalidInput(f"stock TP: family {plan.model.family!r} given; expected bert or vit")


def _bert(model: Any, mesh: DeviceMesh, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    for layer in model.bert.encoder.layer:
        styles: dict[str, ParallelStyle] = {
            "attention.self": _whole(),
            "attention.self.query": ColwiseParallel(),
            "attention.self.key": ColwiseParallel(),
            "attention.self.value": ColwiseParallel(),
            "attention.output.dense": RowwiseParallel(),
            "intermediate.dense": ColwiseParallel(),
            "output.dense": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    ends: dict[str, ParallelStyle] = {
        "bert.embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "cls.predictions.decoder": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends, src_data_rank=None)
    head = model.cls.predictions
    head.decoder.weight = model.bert.embeddings.word_embeddings.weight  # tied, as it was: both are split by words
    head.bias = head.decoder.bias
    optimizer = _optimizer(model)

    def step() -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        with loss_parallel():
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return _local(loss)

    return step


def _vit(model: Any, mesh: DeviceMesh, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    for layer in model.vit.layers:
        styles: dict[str, ParallelStyle] = {
            "layernorm_before": PrepareModuleOutput(  # for the same reason; only attention reads it
                output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
            ),
            "attention.q_proj": ColwiseParallel(),
            "attention.k_proj": ColwiseParallel(),
            "attention.v_proj": ColwiseParallel(),
            "attention.o_proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, styles, src_data_rank=None)
    return plain_step(model, batch, _optimizer(model))


def _optimizer(model: Any) -> torch.optim.Optimizer:
    """A fused step takes distributed and plain parameters in groups of their own."""
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    return adam([{"params": split}, {"params": whole}])


def _local(loss: Tensor) -> Tensor:
    """All ranks have it whole."""
    whole = loss.to_local() if isinstance(loss, DTensor) else loss
    return whole.detach()
