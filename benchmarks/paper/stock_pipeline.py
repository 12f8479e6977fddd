"""Pure PP as PyTorch itself does it: ``torch.distributed.pipelining`` with GPipe, a rank a stage.

Stages are cut where the planner's pure pipeline cuts them, and there are as many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.plan import Plan
from stock import adam, batch_for, stock_model

__all__ = ["gpipe"]


class _BertEmbedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings = model.bert.embeddings

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embeddings(input_ids=ids)
        return hidden


class _VitHead(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layernorm, self.classifier = model.vit.layernorm, model.classifier

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layernorm(hidden)[:, 0])
        return logits


def _layers(model: Any, family: str) -> list[nn.Module]:
    """Embedding, blocks, head: the planner's layers."""
    if family == "bert":
        return [_BertEmbedding(model), *model.bert.encoder.layer, model.cls]
    if family == "vit":
        return [model.vit.embeddings, *model.vit.layers, _VitHead(model)]
    raise InvalidInput(f"stock PP: family {family!r} given; expected bert or vit")


class _Part(nn.Module):
    """One stage."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            output = layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden


def gpipe(plan: Plan, device: torch.device) -> Callable[[], Tensor | None]:
    rank, world, family = dist.get_rank(), dist.get_world_size(), plan.model.family
    layers = _layers(stock_model(plan, device), family)
    part = _Part([layers[layer.index] for layer in plan.stages[rank].layers])
    del layers
    tied = _tied(part, family)
    batch = batch_for(plan)
    targets = int((batch["labels"] != -100).sum())
    # Only the ends take memory for the batch.
    inputs = (batch["input_ids" if family == "bert" else "pixel_values"].to(device),) if rank == 0 else ()
    labels = batch["labels"].to(device) if rank == world - 1 else None
    del batch

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        summed = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        return summed / targets

    stage = PipelineStage(part, rank, world, device)
    schedule = ScheduleGPipe(stage, n_microbatches=plan.micro_batches, loss_fn=loss_of, scale_grads=False)
    optimizer = adam(part.parameters())
    # Where it can be told to, the schedule does not join logits that nobody reads.
    options: dict[str, Any] = (
        {"return_outputs": False} if "return_outputs" in signature(schedule.step).parameters else {}
    )

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=labels, losses=losses, **options)
        if tied is not None:
            weight, group = tied
            dist.all_reduce(weight.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum() if losses else None

    return step


def _tied(part: _Part, family: str) -> tuple[Any, dist.ProcessGroup] | None:
    """The word embedding, which first and last stage both hold, and their group: the schedule does not know of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if family != "bert" or world == 1:
        return None
    group = dist.new_group([0, world - 1])
    if rank not in (0, world - 1):
        return None
    module: Any = part.layers[0] if rank == 0 else part.layers[-1]
    weight = module.embeddings.word_embeddings.weight if rank == 0 else module.predictions.decoder.weight
    assert isinstance(group, dist.ProcessGroup)
    return weight, group
