"""One stage on this rank: its layers in order, each with its strategy, and Slice-Gather between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from galvatron.families.layer import Activations, Layer
from galvatron.runtime.batches import MicroBatch
from galvatron.runtime.layout.slice_gather import LayoutChange
from galvatron.runtime.offload import HostMemory
from galvatron.runtime.randomness import LayerRandomness
from galvatron.runtime.selective import Selective

__all__ = ["Saving", "Stage", "StageLayer"]


@dataclass(kw_only=True)
class Saving:
    """What of a layer stays for backward, and where; all of it, on the device, where nothing else is said."""

    recompute: bool = False
    """Only its input."""
    selective: Selective | None = None
    """Some of its results; None also where the compiler sees to that."""
    host: HostMemory | None = None
    """All of it, in there."""


class StageLayer(nn.Module):
    """A layer as a stage runs it: with its random numbers, and recomputed in backward if its strategy says so.

    This is what FSDP2 wraps, so that a recomputed layer's parameters are gathered once for both its passes.
    """

    def __init__(self, layer: Layer, randomness: LayerRandomness, saving: Saving) -> None:
        super().__init__()
        self.layer = layer
        self._randomness, self.saving = randomness, saving
        self.after_backward: Callable[[], None] | None = None
        """Called when a micro-batch's backward has gone through the layer."""
        self.always_passed = False
        """Whether that must be, even where nothing before the layer trains: its input is then given a gradient."""

    def seed(self, seed: int) -> None:
        """Draw from another seed from now on."""
        self._randomness.seed = seed

    def forward(self, activations: Activations, context: Any, step: tuple[int, int]) -> Activations:
        def run(*tensors: torch.Tensor) -> Activations:
            self._randomness.begin(step if self.training else None)
            try:
                with self._randomness.watched() if self.training else nullcontext():
                    output: Activations = self.layer(tensors, context)
            finally:
                self._randomness.end()
            return output

        if self.after_backward is not None and activations and torch.is_grad_enabled():
            if self.always_passed and not any(tensor.requires_grad for tensor in activations):
                activations = (activations[0].detach().requires_grad_(), *activations[1:])
            activations = (_WhenPassed.apply(activations[0], self.after_backward), *activations[1:])
        saving = self.saving
        if not torch.is_grad_enabled():
            return run(*activations)
        if saving.host is not None:
            with saving.host.around(self.layer.parameters(), [context], step):
                return run(*activations)
        if not saving.recompute and saving.selective is None:
            return run(*activations)
        contexts = noop_context_fn if saving.selective is None else saving.selective.contexts
        # The layer seeds its generator itself, so no state needs to be stashed.
        recomputed: Activations = checkpoint(
            run, *activations, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return recomputed


class _WhenPassed(torch.autograd.Function):
    """The tensor itself. Backward comes here after all else in the layer: autograd runs what is ready in the reverse of
    the order in which forward made it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.then()
        return gradient, None


class Stage(nn.Module):
    """Consecutive layers on one group of devices."""

    def __init__(
        self, stage_layers: Sequence[StageLayer], portions: Sequence[int], changes: Sequence[LayoutChange | None]
    ) -> None:
        """``portions``: number of each layer's; ``changes``: before each layer; None before the first, which is
        given its own layout."""
        super().__init__()
        self.stage_layers = nn.ModuleList(stage_layers)
        self._portions, self._changes = tuple(portions), tuple(changes)

    @property
    def layers(self) -> list[Layer]:
        """In order."""
        return [own.layer for own in self.stage_layers if isinstance(own, StageLayer)]

    def seed(self, seed: int) -> None:
        """Let all layers draw from another seed from now on."""
        for stage_layer in self.stage_layers:
            assert isinstance(stage_layer, StageLayer)
            stage_layer.seed(seed)

    def forward(self, activations: Activations, micro_batch: MicroBatch, step: tuple[int, int]) -> Activations:
        for stage_layer, portion, change in zip(self.stage_layers, self._portions, self._changes, strict=True):
            if change is not None:
                activations = change(activations)
            activations = stage_layer(activations, micro_batch.context(portion), step)
        return activations
