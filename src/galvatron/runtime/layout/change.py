"""The form of activations between layers: which rows, and which tokens, each rank holds.

A layer with sequence parallelism takes and gives activations divided along the sequence; all others take whole
sequences. Between layers of different forms the sequence is gathered, the rows change by Slice-Gather, and the sequence
is divided again.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Form
from galvatron.families.layer import Activations
from galvatron.runtime.layout.groups import GroupPool, Position
from galvatron.runtime.layout.rows import Change
from galvatron.runtime.tensor_parallel import operators

__all__ = ["FormChange"]


class FormChange:
    """From one form to another, with gradients."""

    def __init__(self, pool: GroupPool, position: Position, rows: int, source: Form, target: Form) -> None:
        """``rows``: of the micro-batch."""
        same = source.sequence == target.sequence
        self._gather: ProcessGroup | None = None if same else pool.along(position, source.sequence)
        self._rows = Change(pool, position, rows, source.rows, target.rows)
        self._slice: ProcessGroup | None = None if same else pool.along(position, target.sequence)

    def __call__(self, activations: Activations) -> Activations:
        return tuple(self._changed(tensor) for tensor in activations)

    def _changed(self, tensor: Tensor) -> Tensor:
        if self._gather is not None:
            tensor = operators.gather_sequence(tensor, self._gather)
        tensor = self._rows(tensor)
        if self._slice is not None:
            tensor = operators.slice_sequence(tensor, self._slice)
        return tensor
