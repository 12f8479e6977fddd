"""A model as a chain of segments: lists of blocks, with what runs before, between and after them.

Most models have one list. A model with an encoder and a decoder has two: its decoder's blocks also take what the
encoder made, which travels beside their hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from galvatron.families.generic.stubs import Call, Unit
from galvatron.families.layer import Activations, Batch

__all__ = ["Anatomy", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A list of blocks that run in order, each on what the one before returned."""

    blocks: str
    """Name of the list."""
    first: int
    """How many blocks the lists before it have."""
    count: int
    hidden_argument: int | str
    """Where a block takes the hidden state: its first argument, or a keyword."""
    extra: tuple[Any, ...] | None
    """What a block returns after the hidden state; None: it returns that alone."""
    handed: tuple[int | str, ...] = ()
    """Where a block takes the tensor that was made before the first of them (by the encoder), if it takes one."""
    unused: int = 0
    """How many of its last blocks have no part in the result (CLIP's last in LLaVA, which reads the one before)."""
    entries: bool = False
    """Whether the hidden state has entries of ``pixel_values`` first (images, patches) instead of samples."""

    @property
    def last(self) -> int:
        """Number of its last block, counted over all lists."""
        return self.first + self.count - 1

    @property
    def last_used(self) -> int:
        """Number of its last block that has a part in the result."""
        return self.last - self.unused

    def hidden(self, call: Call) -> Any:
        """The hidden state that a block was called with."""
        return call.argument(self.hidden_argument)

    def activations(self, call: Call) -> Activations:
        """All that enters a block and travels."""
        return (self.hidden(call), *(call.argument(place) for place in self.handed[:1]))

    def called_with(self, call: Call, activations: Activations) -> Call:
        """The same call on other activations."""
        hidden, *handed = activations
        return call.given({self.hidden_argument: hidden, **dict.fromkeys(self.handed, *handed)})

    def wrap(self, hidden: Tensor) -> Any:
        """What a block returns if this is its hidden state."""
        return hidden if self.extra is None else (hidden, *self.extra)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a trial run found out about a model."""

    segments: tuple[Segment, ...]
    units: tuple[Unit, ...]
    around: tuple[tuple[str, ...], ...]
    """Names of the units that run before the first list, between lists, and after the last; idle ones in the first."""
    idle: tuple[str, ...]
    """Units that such batches do not use (the vision tower of a model that reads text); they must be in checkpoints."""
    inputs: frozenset[str]
    """What the model's forward takes, apart from labels."""

    @property
    def lists(self) -> tuple[str, ...]:
        """Names of the lists of blocks."""
        return tuple(segment.blocks for segment in self.segments)

    @property
    def last(self) -> int:
        """Number of the last block."""
        return self.segments[-1].last

    def segment(self, block: int) -> Segment:
        """The one that has the block of this number."""
        return next(segment for segment in self.segments if block <= segment.last)

    def name(self, block: int) -> str:
        """The stock model's name of a block."""
        segment = self.segment(block)
        return f"{segment.blocks}.{block - segment.first}"

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the blocks that have no part in the result."""
        numbers = range(self.last + 1)
        return tuple(self.name(block) for block in numbers if block > self.segment(block).last_used)

    def modules(self, names: tuple[str, ...]) -> dict[str, tuple[str, nn.Module]]:
        """These units in the form that a layer takes."""
        found = {unit.name: unit.module for unit in self.units}
        return {name.replace(".", "_"): (name, found[name]) for name in names}

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the units that such batches use."""
        return tuple(name for names in self.around for name in names if name not in self.idle)

    @property
    def nameless(self) -> tuple[str, ...]:
        """Units that no layer has: they are only another name of weights that others use."""
        held = {name for names in self.around for name in names}
        return tuple(unit.name for unit in self.units if unit.name not in held)

    def pick(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs in a batch."""
        return {name: own for name, own in batch.items() if name in self.inputs}

    def hidden(self, call: Call) -> Any:
        """The hidden state that a block was called with."""
        return self.segment(call.block).hidden(call)

    def passed(self, call: Call) -> Any:
        """What a block returns that passes on its hidden state."""
        return self.returned(call, self.hidden(call))

    def returned(self, call: Call, hidden: Tensor) -> Any:
        """What a block returns if this is its hidden state."""
        return self.segment(call.block).wrap(hidden)
