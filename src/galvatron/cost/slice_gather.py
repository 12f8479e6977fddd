"""Slice-Gather: what it costs to change the activation layout between neighbouring layers (paper Section 4).

From layout A to B, slicing is free and one all-gather spans the digits in A∖B; backward runs the other way, from B to
A, so a change that is free in forward is paid in backward (docs/cost-model.md, "Slice-Gather").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from galvatron.cost.communication import Floats
from galvatron.spec import Cluster, Layout, gathered_digits, lines_up

__all__ = ["change_s", "layout_rates"]


def layout_rates(layouts: Sequence[Layout], cluster: Cluster) -> tuple[Floats, Floats]:
    """Seconds a byte of the whole micro-batch's boundary tensor, and fixed seconds, for each pair of layouts.

    Forward and backward together; (K, K), from row to column. Slicing first leaves 1/|A∪B| of the rows on each rank,
    gathering g = |A∖B| such pieces 1/|B|; a ring moves (g−1)/g of that. Layouts that write ranks in different radices
    gather the whole batch before they slice it.
    """
    count = len(layouts)
    per_byte, fixed = np.zeros((count, count)), np.zeros((count, count))
    for i, source in enumerate(layouts):
        for j, target in enumerate(layouts):
            for before, after in ((source, target), (target, source)):
                digits = gathered_digits(before, after)
                if not digits:
                    continue
                group = math.prod(digit.radix for digit in digits)
                parts = math.prod(digit.radix for digit in after) if lines_up(before, after) else 1
                link = cluster.link(digits)
                per_byte[i, j] += (group - 1) / group / parts / link.bytes_per_s
                fixed[i, j] += link.latency_s
    return per_byte, fixed


def change_s(batch_bytes: Floats, per_byte: Floats, fixed: Floats) -> Floats:
    """Time to change layout between two layers, for whole-micro-batch boundary tensors of these sizes."""
    seconds: Floats = batch_bytes * per_byte + fixed
    return seconds
