"""Who must hold which rows and tokens: an oracle that numbers them.

A rank holds the rows whose number agrees with its own in the digits of the layout, and likewise the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from galvatron.runtime.layout import Grid
from galvatron.space import Space, Switches
from galvatron.spec import Cluster, Device, Digit, Form, Layout, Level

__all__ = ["flat_cluster", "forms", "part"]


def forms(devices: int) -> list[Form]:
    """Every form that some strategy has, those of sequence parallelism and hybrid sharding included."""
    switches = Switches(hybrid_sharding=True, sequence_parallel=True)
    strategies = Space(name="full", title="", switches=switches).strategies(devices)
    return list(dict.fromkeys(strategy.form for strategy in strategies))


def _value(number: int, digit: Digit) -> int:
    return number // digit.stride % digit.radix


def _place(rank: int, digits: Layout) -> int:
    """A rank's number among those that some digits tell apart."""
    place = 0
    for digit in sorted(digits, key=lambda digit: -digit.stride):
        place = place * digit.radix + _value(rank, digit)
    return place


def _rows(rank: int, layout: Layout, axes: Sequence[Digit], rows: int) -> list[int]:
    """The rows a rank holds if each axis numbers equal blocks, the first axis the largest ones."""
    held = []
    for row in range(rows):
        block, agrees = row // (rows // prod(axis.radix for axis in axes)), True
        for axis in reversed(axes):
            block, coordinate = divmod(block, axis.radix)
            agrees = agrees and (axis not in layout or coordinate == _value(rank, axis))
        if agrees:
            held.append(row)
    return held


def _chunk(rank: int, layout: Layout, rows: int) -> list[int]:
    """The rows a rank holds where digits have no axes: its share, in order."""
    each = rows // prod(digit.radix for digit in layout)
    return list(range(_place(rank, layout) * each, (_place(rank, layout) + 1) * each))


def part(rank: int, whole: Tensor, form: Form, grid: Grid) -> Tensor:
    """What a rank holds of a whole micro-batch."""
    axes = sorted(grid.axes, key=lambda axis: -axis.stride)
    rows = _rows(rank, form.rows, axes, grid.rows) if grid.fits else _chunk(rank, form.rows, grid.rows)
    each = whole.shape[1] // prod(digit.radix for digit in form.sequence)
    first = _place(rank, form.sequence) * each
    return whole[torch.tensor(rows)][:, first : first + each].contiguous()


def flat_cluster(devices: int) -> Cluster:
    """One byte a second for everyone, no latency: what a change costs is what a rank receives."""
    device = Device(name="device", memory_bytes=1, memory_bytes_per_s=1.0, fp32_flops_per_s=1.0)
    level = Level(name="flat", units=devices, bytes_per_s=1.0, latency_s=0.0, shared=False)
    return Cluster(name="flat", device=device, levels=(level,), reserved_bytes=0)
