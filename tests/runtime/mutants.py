"""Deliberate breaks of the runtime, each a patch of a part of it inside a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from galvatron.core.spec import Factors
from galvatron.families.bert import adapter as bert
from galvatron.runtime import assembly, batches, model
from galvatron.runtime import whole as norm
from galvatron.runtime.data_parallel import making, sharded, units
from galvatron.runtime.data_parallel.replicated import ReplicatedUnit
from galvatron.runtime.data_parallel.sharded import ShardedUnit
from galvatron.runtime.layout import slice_gather as layout
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.pipeline.transfer import StageEnd
from galvatron.runtime.randomness import LayerRandomness
from galvatron.runtime.tensor_parallel import operators, regions
from galvatron.runtime.tensor_parallel.vocabulary import SplitCrossEntropy, SplitEmbedding
from galvatron.runtime.tied import in_stage as borrowing
from galvatron.runtime.tied.across_stages import TieExchange

__all__ = ["MUTANTS", "Patches", "mutant", "under", "wrapped"]

Patches = Iterator[Any]
MUTANTS: dict[str, Callable[[], Patches]] = {}


def mutant(make: Callable[[], Patches]) -> Callable[[], Patches]:
    """One more break, named as its function is."""
    MUTANTS[make.__name__.strip("_").replace("_", " ")] = make
    return make


@contextmanager
def _applied(name: str) -> Iterator[None]:
    patches = list(MUTANTS[name]())
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def under(mutant: str | None, function: Callable[..., Any], *args: Any) -> Any:
    """On a rank: call a function while the runtime is broken this way."""
    if mutant is None:
        return function(*args)
    with _applied(mutant):
        return function(*args)


def wrapped(owner: Any, name: str, after: Callable[..., Any]) -> Any:
    """Call ``after(result, self, …)`` with what the method gave, and give that."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return after(original(self, *args, **kwargs), self, *args, **kwargs)

    return patch.object(owner, name, method)


# Data parallelism


@mutant
def _dp_averages_instead_of_summing() -> Patches:
    def halve(_: None, unit: ReplicatedUnit) -> None:
        if unit._group is not None and unit._flat is not None:
            unit._flat /= unit._group.size()

    yield wrapped(ReplicatedUnit, "finish", halve)


@mutant
def _dp_never_sums() -> Patches:
    yield patch.object(ReplicatedUnit, "_start_sum", lambda self: None)


@mutant
def _dp_sums_the_last_micro_batch_only() -> Patches:
    def forget(_: None, unit: ReplicatedUnit, *, last: bool) -> None:
        if last and unit._flat is not None:
            unit._flat.zero_()

    yield wrapped(ReplicatedUnit, "expect_backward", forget)


@mutant
def _sdp_averages_instead_of_summing() -> Patches:
    def average(_: None, unit: ShardedUnit, *args: Any, **kwargs: Any) -> None:
        unit.fsdp.set_gradient_divide_factor(float(unit.groups.shard.size()))

    yield wrapped(ShardedUnit, "__init__", average)


@mutant
def _sdp_loses_all_but_the_last_micro_batch() -> Patches:
    def forget(_: None, unit: ShardedUnit, *, last: bool) -> None:
        for parameter in unit._sharded:
            parameter.grad = None

    yield wrapped(ShardedUnit, "expect_backward", forget)


@mutant
def _hybrid_sharding_never_sums_over_dp() -> Patches:
    def never(_: None, unit: ShardedUnit, *, last: bool) -> None:
        unit.fsdp.set_requires_all_reduce(unit.groups.replicate is None)

    yield wrapped(ShardedUnit, "expect_backward", never)


@mutant
def _sharded_weights_stay_gathered_after_an_evaluation() -> Patches:
    yield patch.object(ShardedUnit, "end_evaluation", lambda self: None)


@mutant
def _gradients_of_earlier_calls_are_summed_again() -> Patches:
    yield patch.object(ParallelModel, "_set_aside", lambda self: [])


# Tensor parallelism


class _NotSummed:
    """Stands for a sum over ranks, and is none."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        self._tensor = tensor

    def result(self) -> Tensor:
        return self._tensor


@mutant
def _f_sums_no_gradients() -> Patches:
    yield patch.object(regions, "collectives", SimpleNamespace(AllReduce=_NotSummed))


@mutant
def _g_sums_no_outputs() -> Patches:
    yield patch.object(operators.reduce_from_region, "forward", lambda tensor, group: tensor.clone())


@mutant
def _the_bias_is_added_before_the_sum() -> Patches:
    def forward(self: regions.SplitRows, tensor: Tensor) -> Tensor:
        reduce_from_region = operators.sum_sequence if self.sequence else operators.reduce_from_region
        return reduce_from_region(functional.linear(tensor, self.matrix, self.bias), self.group)

    yield patch.object(regions.SplitRows, "forward", forward)


@mutant
def _sequence_parallel_norms_keep_partial_gradients() -> Patches:
    yield patch.object(units.Unit, "sum_partial", lambda self: None)


@mutant
def _gathered_sequences_sum_their_gradients() -> Patches:
    def backward(gradient: Tensor, group: Any) -> Tensor:
        return operators.SequenceReduceScatter(gradient.contiguous(), group).result()

    yield patch.object(operators.gather_sequence, "backward", backward)


@mutant
def _words_are_numbered_from_the_wrong_rank() -> Patches:
    def shifted(_: None, embedding: SplitEmbedding, *args: Any) -> None:
        embedding.words = range(embedding.words.start + 1, embedding.words.stop + 1)

    yield wrapped(SplitEmbedding, "__init__", shifted)


@mutant
def _targets_are_numbered_from_the_wrong_rank() -> Patches:
    def shifted(_: None, loss: SplitCrossEntropy, *args: Any) -> None:
        loss.words = range(loss.words.start + 1, loss.words.stop + 1)

    yield wrapped(SplitCrossEntropy, "__init__", shifted)


# Slice-Gather and stages


@mutant
def _slices_have_the_rows_of_a_neighbour() -> Patches:
    step = layout._Step.__call__

    def neighbours(self: layout._Step, rows: Tensor) -> Tensor:
        number, parts = self.before
        return step(replace(self, before=((number + 1) % parts, parts)), rows)

    yield patch.object(layout._Step, "__call__", neighbours)


@mutant
def _slice_gather_sums_gradients_of_copies() -> Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group = ctx.change.forward.group
        copies = 1 if group is None else group.size()
        return ctx.change.backward(gradient.contiguous()) * copies, None

    yield patch.object(layout._SliceGather, "backward", staticmethod(backward))


@mutant
def _inputs_stay_in_order_when_rows_change() -> Patches:
    def unmoved(assignment: layout.RowAssignment, target: Factors) -> layout.RowAssignment:
        return layout.RowAssignment(target, assignment.order)

    yield patch.object(layout.RowAssignment, "changed", unmoved)


@mutant
def _inputs_are_those_of_a_neighbours_rows() -> Patches:
    def moved(_: None, reader: batches.Reader, *args: Any, **kwargs: Any) -> None:
        reader._index ^= 1

    yield wrapped(batches.Reader, "__init__", moved)


@mutant
def _stages_receive_rows_in_another_order() -> Patches:
    yield wrapped(StageEnd, "rows", lambda rows, side, index: rows if side.ranks[0] == 0 else rows[::-1])


# Loss and norm


@mutant
def _ignored_targets_are_counted() -> Patches:
    yield patch.object(bert, "count_targets", lambda labels: labels.numel())


@mutant
def _the_norm_counts_every_copy() -> Patches:
    def counted(parameters: Any, device: torch.device) -> Tensor:
        return norm.gradient_norm([replace(local, replicas=1) for local in parameters], device)

    yield patch.object(model, "gradient_norm", counted)


@mutant
def _the_norm_is_that_of_the_ranks_own_part() -> Patches:
    def own(parameters: Any, device: torch.device) -> Tensor:
        with patch.object(dist, "get_world_size", lambda: 1):
            return norm.gradient_norm(parameters, device)

    yield patch.object(model, "gradient_norm", own)


@mutant
def _the_norm_counts_tied_weights_twice() -> Patches:
    def twice(parameters: Any, device: torch.device) -> Tensor:
        return norm.gradient_norm([replace(local, counted=True) for local in parameters], device)

    yield patch.object(model, "gradient_norm", twice)


@mutant
def _clipping_scales_nothing() -> Patches:
    yield patch.object(model, "clip_", lambda parameters, norm, limit: None)


@mutant
def _the_loss_counts_every_copy() -> Patches:
    yield wrapped(ParallelModel, "__init__", lambda _, self, *parts: setattr(self, "_loss_replicas", 1))


# Tied weights


@mutant
def _copies_of_tied_weights_are_not_summed() -> Patches:
    yield patch.object(TieExchange, "__call__", lambda self, gradient: None)


@mutant
def _borrowed_weights_give_no_gradient() -> Patches:
    resplit = borrowing.resplit
    yield patch.object(assembly, "resplit", lambda *args: resplit(*args).detach())


@mutant
def _weights_split_anew_keep_one_ranks_gradient() -> Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        each = -(-gradient.shape[0] // ctx.group.size())
        first = ctx.group.rank() * each
        return gradient[first : first + ctx.held].clone(), None, None

    yield patch.object(borrowing._WholeRows, "backward", staticmethod(backward))


# Precision and memory


@mutant
def _masters_are_kept_in_bf16() -> Patches:
    def rounded(_: None, unit: Any) -> None:
        for local in unit.locals:
            local.master.data.copy_(local.master.data.bfloat16())

    yield wrapped(ReplicatedUnit, "begin", rounded)
    yield wrapped(ShardedUnit, "begin", rounded)


@mutant
def _sharded_layers_stay_gathered_until_backward() -> Patches:
    yield patch.object(making, "shard", lambda *args, reshard, **kept: sharded.shard(*args, reshard=False, **kept))


# Random numbers


@mutant
def _attention_drops_alike_on_all_tensor_parallel_ranks() -> Patches:
    yield patch.object(LayerRandomness, "inside", lambda self: self._seed(0))


@mutant
def _ranks_drop_differently_outside_the_split_parts() -> Patches:
    yield patch.object(LayerRandomness, "outside", lambda self: self._seed(self.tensor + 1))


@mutant
def _all_rows_drop_alike() -> Patches:
    begin = LayerRandomness.begin

    def first_rows(self: LayerRandomness, step: Any) -> None:
        self.rows = 0
        begin(self, step)

    yield patch.object(LayerRandomness, "begin", first_rows)


@mutant
def _recomputing_draws_anew() -> Patches:
    begin = LayerRandomness.begin

    def counted(self: LayerRandomness, step: Any) -> None:
        self.seed += 1
        begin(self, step)

    yield patch.object(LayerRandomness, "begin", counted)
