"""The tensors of a training state as parts of whole ones: what this rank writes, and what it reads.

A state tensor shaped like its parameter is divided as the parameter is; a scalar is the same on every rank. A shard is
named by blocks of the whole (``ParameterShard.blocks``), so that any other plan finds what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from galvatron.core.errors import InvalidInput
from galvatron.runtime.data_parallel.shards import ParameterShard, ShardBlock
from galvatron.runtime.data_parallel.units import LocalParameter
from galvatron.runtime.model import ParallelModel

__all__ = ["Part", "buffer_parts", "staged", "targets"]

_BLOCK_BYTES = 64 << 20
"""About the largest block written as one: a reader holds and checks one at a time, and may need just a part of it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank has to do with one whole tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    blocks: dict[tuple[int, ...], Tensor]
    """By where each begins in the whole."""


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    shard: ParameterShard
    tensor: Tensor
    scalar: bool


def staged(model: ParallelModel, optimizer: Optimizer) -> dict[str, Part]:
    """Copies in CPU memory of what this rank is to write.

    Of what several ranks hold, one writes: the one with the fewest bytes so far. All holders of a shard go through the
    same entries in the same order, so they agree without a word.
    """
    parts: dict[str, Part] = {}
    loads: dict[tuple[int, ...], list[int]] = {}
    for local in model.locals:
        blocks = local.shard.blocks()
        if not local.counted or not blocks:  # another stage's copy of a tied weight speaks for this one
            continue
        first = not any(blocks[0].offsets)
        load = loads.setdefault(local.holders, [0] * len(local.holders))
        for entry in _entries(local, optimizer):
            if entry.scalar and not first:
                continue
            writer = load.index(min(load))
            load[writer] += entry.tensor.nbytes
            if local.holders[writer] == model.rank:
                parts[entry.key] = _copied(entry)
    if model.rank == 0:
        parts |= buffer_parts(model.buffers.values())
    return parts


def buffer_parts(buffers: Mapping[str, Tensor]) -> dict[str, Part]:
    """Buffers, to be written or to be read into."""
    return {
        f"buffer/{name}": Part(shape=tuple(own.shape), dtype=own.dtype, blocks={(0,) * own.ndim: own})
        for name, own in buffers.items()
    }


def targets(model: ParallelModel, optimizer: Optimizer | None) -> dict[str, Part]:
    """Views of all that this rank holds, to be read into."""
    parts: dict[str, Part] = {}
    for local in model.locals:
        for entry in _entries(local, optimizer):
            blocks = {block.offsets: block.of(entry.tensor) for block in entry.shard.blocks()}
            parts[entry.key] = Part(shape=entry.shard.shape, dtype=entry.tensor.dtype, blocks=blocks)
    return parts


def _entries(local: LocalParameter, optimizer: Optimizer | None) -> Iterator[_Entry]:
    master = local.master.detach()
    yield _Entry(f"model/{local.name}", local.shard, master, scalar=False)
    state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(local.master, {})
    for name, value in sorted(state.items()):
        key = f"optimizer/{local.name}/{name}"
        if isinstance(value, Tensor) and value.shape == master.shape:
            yield _Entry(key, local.shard, value.detach(), scalar=False)
        elif isinstance(value, Tensor) and value.dim() == 0:
            yield _Entry(key, ParameterShard(()), value.detach(), scalar=True)
        elif value is not None:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(
                f"{type(optimizer).__name__}: its state {name!r} of {local.name} is {given}; expected a tensor shaped "
                f"like the parameter {tuple(master.shape)}, or a scalar one: optimizers must work elementwise"
            )


def _copied(entry: _Entry) -> Part:
    blocks = {
        block.offsets: torch.empty(block.sizes, dtype=entry.tensor.dtype).copy_(block.of(entry.tensor))
        for block in entry.shard.blocks()
        for block in _divided(block, entry.tensor.element_size())
    }
    return Part(shape=entry.shard.shape, dtype=entry.tensor.dtype, blocks=blocks)


def _divided(block: ShardBlock, element_bytes: int) -> Iterator[ShardBlock]:
    """A large box in blocks of whole rows."""
    total = torch.Size(block.sizes).numel() * element_bytes
    if not block.sizes or total <= _BLOCK_BYTES:
        yield block
        return
    rows = max(1, _BLOCK_BYTES * block.sizes[0] // total)
    for row in range(0, block.sizes[0], rows):
        yield replace(
            block,
            offsets=(block.offsets[0] + row, *block.offsets[1:]),
            inside=(block.inside[0] + row, *block.inside[1:]),
            sizes=(min(rows, block.sizes[0] - row), *block.sizes[1:]),
        )
