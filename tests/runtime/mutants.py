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
from galvatron.runtime.experts import dispatch
from galvatron.runtime.experts import exchange as exchanging
from galvatron.runtime.layout import slice_gather as layout
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.pipeline.transfer import StageEnd
from galvatron.runtime.randomness import LayerRandomness
from galvatron.runtime.tensor_parallel import operators, regions
from galvatron.runtime.tensor_parallel import split as splitting
from galvatron.runtime.tensor_parallel.vocabulary import SplitCrossEntropy, SplitEmbedding
from galvatron.runtime.tied import in_stage as borrowing
from galvatron.runtime.tied.across_stages import TieExchange

__all__ = ["MUTANTS", "under"]

_Patches = Iterator[Any]
MUTANTS: dict[str, Callable[[], _Patches]] = {}


def _mutant(make: Callable[[], _Patches]) -> Callable[[], _Patches]:
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


def _wrapped(owner: Any, name: str, after: Callable[..., Any]) -> Any:
    """Call ``after(result, self, …)`` with what the method gave, and give that."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return after(original(self, *args, **kwargs), self, *args, **kwargs)

    return patch.object(owner, name, method)


# Data parallelism


@_mutant
def _dp_averages_instead_of_summing() -> _Patches:
    def halve(_: None, unit: ReplicatedUnit) -> None:
        if unit._group is not None and unit._flat is not None:
            unit._flat /= unit._group.size()

    yield _wrapped(ReplicatedUnit, "finish", halve)


@_mutant
def _dp_never_sums() -> _Patches:
    yield patch.object(ReplicatedUnit, "_start_sum", lambda self: None)


@_mutant
def _dp_sums_the_last_micro_batch_only() -> _Patches:
    def forget(_: None, unit: ReplicatedUnit, *, last: bool) -> None:
        if last and unit._flat is not None:
            unit._flat.zero_()

    yield _wrapped(ReplicatedUnit, "expect_backward", forget)


@_mutant
def _sdp_averages_instead_of_summing() -> _Patches:
    def average(_: None, unit: ShardedUnit, *args: Any, **kwargs: Any) -> None:
        unit.fsdp.set_gradient_divide_factor(float(unit.groups.shard.size()))

    yield _wrapped(ShardedUnit, "__init__", average)


@_mutant
def _sdp_loses_all_but_the_last_micro_batch() -> _Patches:
    def forget(_: None, unit: ShardedUnit, *, last: bool) -> None:
        for parameter in unit._sharded:
            parameter.grad = None

    yield _wrapped(ShardedUnit, "expect_backward", forget)


@_mutant
def _hybrid_sharding_never_sums_over_dp() -> _Patches:
    def never(_: None, unit: ShardedUnit, *, last: bool) -> None:
        unit.fsdp.set_requires_all_reduce(unit.groups.replicate is None)

    yield _wrapped(ShardedUnit, "expect_backward", never)


@_mutant
def _sharded_weights_stay_gathered_after_an_evaluation() -> _Patches:
    yield patch.object(ShardedUnit, "end_evaluation", lambda self: None)


@_mutant
def _gradients_of_earlier_calls_are_summed_again() -> _Patches:
    yield patch.object(ParallelModel, "_set_aside", lambda self: [])


# Tensor parallelism


class _NotSummed:
    """Stands for a sum over ranks, and is none."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        self._tensor = tensor

    def result(self) -> Tensor:
        return self._tensor


@_mutant
def _f_sums_no_gradients() -> _Patches:
    yield patch.object(regions, "collectives", SimpleNamespace(AllReduce=_NotSummed))


@_mutant
def _g_sums_no_outputs() -> _Patches:
    yield patch.object(operators._ReduceFromRegion, "forward", staticmethod(lambda ctx, tensor, group: tensor.clone()))


@_mutant
def _the_bias_is_added_before_the_sum() -> _Patches:
    def forward(self: regions.SplitRows, tensor: Tensor) -> Tensor:
        reduce_from_region = operators.sum_sequence if self.sequence else operators.reduce_from_region
        return reduce_from_region(functional.linear(tensor, self.matrix, self.bias), self.group)

    yield patch.object(regions.SplitRows, "forward", forward)


@_mutant
def _sequence_parallel_norms_keep_partial_gradients() -> _Patches:
    yield patch.object(units.Unit, "sum_partial", lambda self: None)


@_mutant
def _gathered_sequences_sum_their_gradients() -> _Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return operators.SequenceReduceScatter(gradient.contiguous(), ctx.group).result(), None

    yield patch.object(operators._GatherSequence, "backward", staticmethod(backward))


@_mutant
def _words_are_numbered_from_the_wrong_rank() -> _Patches:
    def shifted(_: None, embedding: SplitEmbedding, *args: Any) -> None:
        embedding.words = range(embedding.words.start + 1, embedding.words.stop + 1)

    yield _wrapped(SplitEmbedding, "__init__", shifted)


@_mutant
def _targets_are_numbered_from_the_wrong_rank() -> _Patches:
    def shifted(_: None, loss: SplitCrossEntropy, *args: Any) -> None:
        loss.words = range(loss.words.start + 1, loss.words.stop + 1)

    yield _wrapped(SplitCrossEntropy, "__init__", shifted)


# Slice-Gather and stages


@_mutant
def _slices_have_the_rows_of_a_neighbour() -> _Patches:
    step = layout._Step.__call__

    def neighbours(self: layout._Step, rows: Tensor) -> Tensor:
        number, parts = self.before
        return step(replace(self, before=((number + 1) % parts, parts)), rows)

    yield patch.object(layout._Step, "__call__", neighbours)


@_mutant
def _slice_gather_sums_gradients_of_copies() -> _Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group = ctx.change.forward.group
        copies = 1 if group is None else group.size()
        return ctx.change.backward(gradient.contiguous()) * copies, None

    yield patch.object(layout._SliceGather, "backward", staticmethod(backward))


@_mutant
def _inputs_stay_in_order_when_rows_change() -> _Patches:
    def unmoved(assignment: layout.RowAssignment, target: Factors) -> layout.RowAssignment:
        return layout.RowAssignment(target, assignment.order)

    yield patch.object(layout.RowAssignment, "changed", unmoved)


@_mutant
def _inputs_are_those_of_a_neighbours_rows() -> _Patches:
    def moved(_: None, reader: batches.Reader, *args: Any, **kwargs: Any) -> None:
        reader._index ^= 1

    yield _wrapped(batches.Reader, "__init__", moved)


@_mutant
def _stages_receive_rows_in_another_order() -> _Patches:
    yield _wrapped(StageEnd, "rows", lambda rows, side, index: rows if side.ranks[0] == 0 else rows[::-1])


# Loss and norm


@_mutant
def _ignored_targets_are_counted() -> _Patches:
    yield patch.object(bert, "count_targets", lambda labels: labels.numel())


@_mutant
def _the_norm_counts_every_copy() -> _Patches:
    def counted(parameters: Any, device: torch.device) -> Tensor:
        return norm.gradient_norm([replace(local, replicas=1) for local in parameters], device)

    yield patch.object(model, "gradient_norm", counted)


@_mutant
def _the_norm_is_that_of_the_ranks_own_part() -> _Patches:
    def own(parameters: Any, device: torch.device) -> Tensor:
        with patch.object(dist, "get_world_size", lambda: 1):
            return norm.gradient_norm(parameters, device)

    yield patch.object(model, "gradient_norm", own)


@_mutant
def _the_norm_counts_tied_weights_twice() -> _Patches:
    def twice(parameters: Any, device: torch.device) -> Tensor:
        return norm.gradient_norm([replace(local, counted=True) for local in parameters], device)

    yield patch.object(model, "gradient_norm", twice)


@_mutant
def _clipping_scales_nothing() -> _Patches:
    yield patch.object(model, "clip_", lambda parameters, norm, limit: None)


@_mutant
def _the_loss_counts_every_copy() -> _Patches:
    yield _wrapped(ParallelModel, "__init__", lambda _, self, *parts: setattr(self, "_loss_replicas", 1))


# Tied weights


@_mutant
def _copies_of_tied_weights_are_not_summed() -> _Patches:
    yield patch.object(TieExchange, "__call__", lambda self, gradient: None)


@_mutant
def _borrowed_weights_give_no_gradient() -> _Patches:
    resplit = borrowing.resplit
    yield patch.object(assembly, "resplit", lambda *args: resplit(*args).detach())


@_mutant
def _weights_split_anew_keep_one_ranks_gradient() -> _Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        each = -(-gradient.shape[0] // ctx.group.size())
        first = ctx.group.rank() * each
        return gradient[first : first + ctx.held].clone(), None, None

    yield patch.object(borrowing._WholeRows, "backward", staticmethod(backward))


# Experts


@_mutant
def _a_token_is_dropped_on_its_way_to_its_expert() -> _Patches:
    exchange = exchanging.exchange

    def dropped(rows: Tensor, *args: Any) -> Tensor:
        kept = torch.ones(len(rows), 1, dtype=rows.dtype)
        kept[:1] = 0.0
        return exchange(rows * kept, *args)

    yield patch.object(dispatch, "exchange", dropped)


@_mutant
def _gradients_of_experts_are_averaged() -> _Patches:
    """Over the ranks of EP, whose tokens they come from."""
    backward = exchanging._Exchange.backward

    def averaged(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ours, *rest = backward(ctx, gradient)
        return ours / ctx.group.size(), *rest

    yield patch.object(exchanging._Exchange, "backward", staticmethod(averaged))


@_mutant
def _replicated_experts_average_their_gradients() -> _Patches:
    def halve(_: None, unit: ReplicatedUnit) -> None:
        if unit._flat is not None and any("experts" in local.name for local in unit.locals):
            assert unit._group is not None
            unit._flat /= unit._group.size()

    yield _wrapped(ReplicatedUnit, "finish", halve)


@_mutant
def _experts_are_summed_over_the_ranks_of_the_layer() -> _Patches:
    """Instead of those that hold the same experts."""

    def everywhere(found: list[Any], maker: Any, part: Any) -> list[Any]:
        return [replace(spread, data_group="data") for spread in found]

    yield _wrapped(making.UnitMaker, "_spreads", everywhere)


@_mutant
def _routers_miss_the_tokens_of_one_rank() -> _Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = exchanging._gathered(gradient, ctx.count, ctx.group)
        if whole.shape[1] == 2:  # weights of the chosen experts
            whole[-(-ctx.count // ctx.group.size()) :] = 0.0
        return whole, None

    yield patch.object(exchanging._SliceTokens, "backward", staticmethod(backward))


@_mutant
def _norms_of_heads_keep_partial_gradients() -> _Patches:
    split = splitting.split
    yield patch.object(assembly, "split", lambda *args: replace(split(*args), partial=frozenset()))


@_mutant
def _packed_projections_are_split_as_plain_ones() -> _Patches:
    def plain(tables: Any) -> Any:
        return None if tables is None else tuple(replace(table, parts=1) for table in tables)

    tables = dispatch.expert_tables
    yield patch.object(dispatch, "expert_tables", lambda *args: plain(tables(*args)))


@_mutant
def _a_rank_without_tokens_has_no_gradients() -> _Patches:
    outputs = dispatch._Dispatch._outputs

    def nothing(self: Any, copies: Tensor, experts: Tensor) -> Tensor:
        return outputs(self, copies, experts) if len(copies) else copies * 1.0

    yield patch.object(dispatch._Dispatch, "_outputs", nothing)


# Precision and memory


@_mutant
def _masters_are_kept_in_bf16() -> _Patches:
    def rounded(_: None, unit: Any) -> None:
        for local in unit.locals:
            local.master.data.copy_(local.master.data.bfloat16())

    yield _wrapped(ReplicatedUnit, "begin", rounded)
    yield _wrapped(ShardedUnit, "begin", rounded)


@_mutant
def _sharded_layers_stay_gathered_until_backward() -> _Patches:
    yield patch.object(making, "shard", lambda *args, reshard, **kept: sharded.shard(*args, reshard=False, **kept))


# Random numbers


@_mutant
def _attention_drops_alike_on_all_tensor_parallel_ranks() -> _Patches:
    yield patch.object(LayerRandomness, "inside", lambda self: self._seed(0))


@_mutant
def _ranks_drop_differently_outside_the_split_parts() -> _Patches:
    yield patch.object(LayerRandomness, "outside", lambda self: self._seed(self.tensor + 1))


@_mutant
def _all_rows_drop_alike() -> _Patches:
    begin = LayerRandomness.begin

    def first_rows(self: LayerRandomness, step: Any) -> None:
        self.rows = 0
        begin(self, step)

    yield patch.object(LayerRandomness, "begin", first_rows)


@_mutant
def _recomputing_draws_anew() -> _Patches:
    begin = LayerRandomness.begin

    def counted(self: LayerRandomness, step: Any) -> None:
        self.seed += 1
        begin(self, step)

    yield patch.object(LayerRandomness, "begin", counted)
