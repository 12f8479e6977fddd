"""Dropout that is the same where activations are replicated and different where they are divided.

Random numbers are a function of (seed, iteration, micro-batch, layer, part of the layer, who computes it), drawn from
the device's default generator, which is seeded anew whenever one of these changes. So a recomputed layer draws the
same numbers again, tensor-parallel ranks agree outside the split parts, and no state needs to be kept or saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["LayerRandomness", "RandomState", "draws", "restored"]


def draws(modules: Iterable[nn.Module]) -> bool:
    """Whether modules draw random numbers in training: some dropout among them has a probability above zero."""
    for part in modules:
        if isinstance(part, nn.Dropout) and part.p > 0:
            return True
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


@contextmanager
def restored(device: torch.device) -> Iterator[None]:
    """Leave the default generators as they were found."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@dataclass(frozen=True, slots=True)
class RandomState:
    """All that random numbers depend on besides the plan and the place they are drawn for."""

    seed: int
    iteration: int
    """Calls of ``forward_backward`` so far."""


@dataclass
class LayerRandomness:
    """Seeds the generator for one layer on one rank."""

    device: torch.device
    seed: int
    layer: int
    rows: int
    """Which rows of the batch, and which of their tokens, this rank computes: its number among those with others."""
    tensor: int
    """Number among the tensor-parallel ranks."""
    sequence: bool
    """Sequence parallelism: outside the split parts ranks hold different tokens."""

    _step: tuple[int, int] | None = None
    """Iteration and micro-batch; None while nothing is drawn."""
    _part: int = 0

    def begin(self, step: tuple[int, int] | None) -> None:
        """At the start of the layer's forward, the recomputed one too; None: it draws nothing (evaluation)."""
        self._step = step
        self._part = 0
        self.outside()

    def inside(self) -> None:
        """Entering a split part: every rank its own numbers."""
        self._seed(self.tensor + 1)

    def outside(self) -> None:
        """Leaving it: the same numbers on all tensor-parallel ranks, unless they hold different tokens."""
        self._seed(self.tensor + 1 if self.sequence else 0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else each call of it is compiled anew
    def _seed(self, who: int) -> None:
        if self._step is None:
            return
        self._part += 1
        key = (self.seed, *self._step, self.layer, self.rows, self._part, who)
        number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)
