"""What the stock programs have in common: the stock model with weights, its batch, its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galvatron.core.spec import Attention
from galvatron.families.build import build_meta, read_config, stock_class
from galvatron.families.registry import layered_model
from galvatron.planner.plan.plan import Plan

__all__ = ["adam", "batch_for", "plain_step", "stock_model"]

_RATE = 1e-3
"""That of torch's Adam, which our runtime's optimizer has too."""


def stock_model(plan: Plan, device: torch.device) -> Any:
    """Hugging Face's own model, initialised on the device; with one seed the same on every rank."""
    training = plan.model.training
    assert plan.model.config is not None
    config: Any = read_config(plan.model.config)
    config.use_cache = False
    stock: Any = stock_class(config)
    attention = "sdpa" if training.attention is Attention.FUSED else "eager"
    torch.manual_seed(0)
    with device:
        model = stock._from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.train()


def batch_for(plan: Plan) -> dict[str, Tensor]:
    """The random batch that our runtime trains on too, on the CPU."""
    assert plan.model.config is not None
    example = layered_model(build_meta(plan.model.config, plan.model.training)).example
    return example(plan.batch, plan.model.training.sequence_length, torch.Generator().manual_seed(0))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_RATE, fused=True)


def plain_step(model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    """One iteration as everybody writes it; gives the loss."""

    def step() -> Tensor:
        loss: Tensor = model(**batch).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
