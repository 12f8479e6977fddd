"""Random numbers that are the same where activations are replicated and different where they are divided.

Dropout's, noise's and random routers' are a function of (seed, iteration, micro-batch, layer, part of the layer, who
computes it), drawn from the device's default generator, which is seeded anew whenever one of these changes. So a
recomputed layer draws the same numbers again, tensor-parallel ranks agree outside the split parts, and no state needs
to be kept or saved. Some models draw masks of their input (SpecAugment) from the generators of NumPy and Python: these
are seeded where a layer begins.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from galvatron.core.errors import InvalidInput

__all__ = ["LayerRandomness", "RandomState", "restored"]


_HostState = tuple[tuple[Any, ...], tuple[Any, ...]]


def _host_state() -> _HostState:
    """Of the generators of NumPy and Python."""
    found: Any = np.random.get_state()
    return found, random.getstate()


def _set_host_state(state: _HostState) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])


@contextmanager
def restored(device: torch.device, *, host: bool = False) -> Iterator[None]:
    """Leave the default generators as they were found; ``host``: those of NumPy and Python too."""
    devices = [device.index or 0] if device.type == "cuda" else []
    found = _host_state() if host else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        if found is not None:
            _set_host_state(found)


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
    needed: bool | None
    """Whether the layer draws in training; None: nothing in it says so, its first forward will show."""

    on_host: bool | None = None
    """Whether it draws from the generators of NumPy or Python in training; None: its first forward will show."""
    _found: _HostState | None = None
    """How these were found, where the layer draws from them. Other threads may use them while none does."""
    _step: tuple[int, int] | None = None
    """Iteration and micro-batch; None while nothing is drawn."""
    _part: int = 0
    _ended: bool = False

    def begin(self, step: tuple[int, int] | None) -> None:
        """At the start of the layer's forward, the recomputed one too; None: it draws nothing (evaluation)."""
        self._step = step if self.needed is not False else None
        self._part, self._ended = 0, False
        self.outside()
        if step is not None and self.on_host is not False:
            number = self._number(step, 0, self._who_outside)
            self._found = _host_state()
            np.random.seed(number % 2**32)
            random.seed(number)

    def end(self) -> None:
        """At the end of that forward: nothing of the layer runs until it begins again."""
        self._ended = True
        if self._found is not None:
            _set_host_state(self._found)
            self._found = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a forward in training, after :meth:`begin`: where it is not known, find out whether it draws.

        Where it does under TP, ranks draw alike in split parts, too: nothing tells them where these begin.
        """
        if self.needed is not None and self.on_host is not None:
            yield
            return
        before, on_host = self._generator().get_state(), _comparable(_host_state())
        yield
        if self.needed is None:
            self.needed = not torch.equal(before, self._generator().get_state())
        if self.on_host is None:
            self.on_host = on_host != _comparable(_host_state())

    def inside(self) -> None:
        """Entering a split part: every rank its own numbers."""
        self._seed(self.tensor + 1)

    def outside(self) -> None:
        """Leaving it: the same numbers on all tensor-parallel ranks, unless they hold different tokens."""
        self._seed(self._who_outside)

    @property
    def _who_outside(self) -> int:
        return self.tensor + 1 if self.sequence else 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else each call of it is compiled anew
    def _seed(self, who: int) -> None:
        if self._step is None:
            return
        if self._ended:
            raise InvalidInput(
                f"layer {self.layer}: a part of it is recomputed in backward by a checkpoint of the model's own, where "
                "TP ranks would draw other random numbers than in forward; remove torch.utils.checkpoint and plan with "
                "recompute (+rc), or train without dropout or without TP"
            )
        self._part += 1
        self._generator().manual_seed(self._number(self._step, self._part, who))

    def _number(self, step: tuple[int, int], part: int, who: int) -> int:
        key = (self.seed, *step, self.layer, self.rows, part, who)
        return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator


def _comparable(state: _HostState) -> tuple[Any, ...]:
    (kind, numbers, *rest), of_python = state
    return kind, np.asarray(numbers).tobytes(), *rest, of_python
