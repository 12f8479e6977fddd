"""Slice-Gather: what it costs to change the form of the activations between neighbouring layers (paper Section 4).

From rows laid out as A to B, slicing is free and one all-gather spans the digits in A∖B; backward runs the other way,
from B to A, so a change that is free in forward is paid in backward. Beyond the paper, sequences divided by sequence
parallelism are gathered before and sliced after (docs/cost-model.md, "Slice-Gather").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from galvatron.cost.communication import Floats
from galvatron.spec import Cluster, Form, Layout, gathered_digits, lines_up

__all__ = ["change_s", "form_rates"]


def form_rates(forms: Sequence[Form], cluster: Cluster) -> tuple[Floats, Floats]:
    """Seconds a byte of the whole micro-batch's boundary tensor, and fixed seconds, for each pair of forms.

    Forward and backward together; (K, K), from row to column.
    """
    count = len(forms)
    per_byte, fixed = np.zeros((count, count)), np.zeros((count, count))
    for i, source in enumerate(forms):
        for j, target in enumerate(forms):
            for digits, parts in _gathers(source, target):
                group, link = _size(digits), cluster.link(digits)
                per_byte[i, j] += (group - 1) / group / parts / link.bytes_per_s
                fixed[i, j] += link.latency_s
    return per_byte + per_byte.T, fixed + fixed.T


def _gathers(source: Form, target: Form) -> Iterator[tuple[Layout, int]]:
    """The all-gathers of one direction: the digits each spans, and the parts of the boundary tensor it leaves.

    A ring of g moves (g−1)/g of what a rank holds afterwards. Sequences that both forms divide alike stay divided.
    """
    alike = source.sequence == target.sequence
    if not alike and source.sequence:
        yield source.sequence, _size(source.rows)
    digits, parts = _gathered_rows(source.rows, target.rows)
    if digits:
        yield digits, parts * _size(source.sequence) if alike else parts


@lru_cache(maxsize=65536)
def _gathered_rows(source: Layout, target: Layout) -> tuple[Layout, int]:
    """The digits of rows to gather, and the parts that leaves.

    Slicing first leaves 1/|A∪B| of the rows on each rank, gathering g = |A∖B| such pieces 1/|B|. Layouts that write
    ranks in different radices gather the whole batch before they slice it.
    """
    return gathered_digits(source, target), _size(target) if lines_up(source, target) else 1


def _size(digits: Layout) -> int:
    return math.prod(digit.radix for digit in digits)


def change_s(batch_bytes: Floats, per_byte: Floats, fixed: Floats) -> Floats:
    """Time to change form between two layers, for whole-micro-batch boundary tensors of these sizes."""
    seconds: Floats = batch_bytes * per_byte + fixed
    return seconds
