"""How operations add up to a layer."""

from __future__ import annotations

from galvatron.core.spec.model import TensorParallel
from galvatron.families.facts.ops import Op, Split, dropout, layer, linear, residual

PARALLEL = TensorParallel(forward_collectives=1, backward_collectives=1, message_bytes=1)


def test_the_transient_is_the_largest_excess_on_the_way_back() -> None:
    first = Op(split=100, gradient=10)
    second = Op(split=5, gradient=30, scratch=7)
    # Second: boundary 20 + gradient 30 + scratch 7 = 57. First: 30 + 10, less the 5 freed, = 35.
    assert layer("x", (first, second), boundary=20, tensor_parallel=PARALLEL).transient_bytes == 57
    # A loss starts from a scalar: 0 + 37, and 35.
    assert layer("x", (first, second), boundary=20, incoming=0, tensor_parallel=PARALLEL).transient_bytes == 37
    # A gradient that waits at the skip connection counts for all but the last operation: 57, and 35 + 50.
    waiting = residual((first, second), 50)
    assert layer("x", waiting, boundary=20, tensor_parallel=PARALLEL).transient_bytes == 85


def test_linear_layers_split_as_megatron_does() -> None:
    column = linear(10, 4, 6, Split.COLUMNS, element=2, bias=True)
    assert (column.parameters, column.replicated_parameters) == (4 * 6 + 6, 0)
    assert (column.split, column.replicated, column.flops) == (0, 10 * 4 * 2, 2 * 10 * 4 * 6)
    row = linear(10, 4, 6, Split.ROWS, element=2, bias=True)
    assert (row.parameters, row.replicated_parameters) == (4 * 6 + 6, 6)
    assert (row.split, row.replicated) == (10 * 4 * 2, 0)


def test_a_layer_that_cannot_be_split_is_whole_everywhere() -> None:
    spec = layer("x", (linear(10, 4, 6, Split.ROWS, element=2, bias=True),), boundary=1, tensor_parallel=None)
    assert (spec.split_activation_bytes, spec.replicated_activation_bytes) == (0, 80)
    assert spec.replicated_parameters == spec.parameters == 30


def test_dropout_that_is_off_is_not_there() -> None:
    assert dropout(100, active=False, element=4) == ()
    assert dropout(100, active=True, element=4)[0].replicated == 100
