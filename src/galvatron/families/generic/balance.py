"""The term of a stock model's loss that keeps its experts evenly busy (``output_router_logits`` of its configuration).

With E experts, of which each token chooses some, the term is E · Σₑ Fₑ Pₑ: Fₑ is how often expert e is chosen and Pₑ
the router's probability of it, both as means over all tokens and all layers of a micro-batch. It is no sum over tokens,
so no layer and no rank can compute its own part. But Fₑ has no gradient and the term is linear in Pₑ. So each sample
carries a *tally* from layer to layer, to which every router adds: how often each expert was chosen, the sum of its
probabilities, and how many tokens counted. At the end ranks add up what has no gradient, and each computes the part of
the term that its own samples' probabilities make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector, maybe_install_capturing_hooks

__all__ = ["Balance", "asks_for_scores", "collect_scores", "give_scores", "record_scores", "recorded"]

_KEY = "router_logits"
_FLAG = "output_router_logits"


@dataclass(frozen=True, slots=True)
class Balance:
    """The term of one model."""

    experts: int
    chosen: int
    """For each token."""
    weight: float
    """Of the term in the loss."""

    @property
    def width(self) -> int:
        """Numbers in the tally of a sample."""
        return 2 * self.experts + 1

    def start(self, rows: int, like: Tensor) -> Tensor:
        """Empty tallies, on the device of a tensor. In fp32 at least: bf16 cannot count to 300."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(rows, self.width, dtype=dtype, device=like.device, requires_grad=torch.is_grad_enabled())

    def add(self, tally: Tensor, scores: list[Tensor], mask: Tensor | None) -> Tensor:
        """The tallies after some routers, whose scores are (tokens, experts); ``mask``: which tokens count."""
        for own in scores:
            wide = own.reshape(len(tally), -1, self.experts).to(tally.dtype)
            probabilities = wide.softmax(-1)
            picked = probabilities.detach().topk(self.chosen, -1).indices
            counts = torch.zeros_like(wide).scatter_(-1, picked, 1.0)
            kept = torch.ones_like(wide[..., :1]) if mask is None else mask.to(tally.dtype)[..., None]
            tally = tally + (torch.cat([counts, probabilities, torch.ones_like(kept)], -1) * kept).sum(1)
        return tally

    def term(self, tally: Tensor, everywhere: Callable[[Tensor], Tensor]) -> Tensor:
        """These samples' part of the term; ``everywhere``: the sum over the ranks that have the other samples."""
        own = tally.sum(0)
        probabilities = own[self.experts : -1]
        known = everywhere(torch.cat([own[: self.experts], own[-1:]]).detach())
        tokens = known[-1].clamp(min=1.0)
        return self.weight * self.experts * (known[:-1] / tokens * probabilities / tokens).sum()


def asks_for_scores(model: nn.Module) -> bool:
    """Whether the configuration of the model, or of a part of it, asks for routers' scores."""
    return any(getattr(config, _FLAG, False) for config in _configs(model))


def collect_scores(model: nn.Module, *, flag: bool) -> None:
    """Let a model's own forward collect routers' scores, or leave them alone."""
    for config in _configs(model):
        if hasattr(config, _FLAG):
            setattr(config, _FLAG, flag)


def _configs(model: nn.Module) -> Iterator[Any]:
    return (config for module in model.modules() if (config := getattr(module, "config", None)) is not None)


def record_scores(model: nn.Module, blocks: str) -> None:
    """Prepare the routers in a list of blocks for :func:`recorded`, as transformers does when scores are asked for."""
    path = blocks.split(".")
    around = [model.get_submodule(".".join(path[:count])) for count in range(len(path))]
    for own in reversed(around):
        if isinstance(own, PreTrainedModel):
            maybe_install_capturing_hooks(own)
            return


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The scores of all routers that run meanwhile."""
    found: dict[str, list[Tensor]] = {_KEY: []}
    token = _active_collector.set(found)
    try:
        yield found[_KEY]
    finally:
        _active_collector.reset(token)


def give_scores(scores: Tensor) -> None:
    """Inside a model's own forward: as if a router had made them."""
    collected = _active_collector.get()
    if collected is not None and _KEY in collected:
        collected[_KEY].append(scores)
