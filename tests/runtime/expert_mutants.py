"""Deliberate breaks of expert parallelism; they join those of ``mutants``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from mutants import Patches, mutant, wrapped
from torch import Tensor

from galvatron.families.generic.balance import Balance
from galvatron.runtime import assembly
from galvatron.runtime.data_parallel import making
from galvatron.runtime.data_parallel.replicated import ReplicatedUnit
from galvatron.runtime.experts import dispatch
from galvatron.runtime.experts import exchange as exchanging
from galvatron.runtime.pipeline import run as pipeline
from galvatron.runtime.tensor_parallel import split as splitting

__all__: list[str] = []


@mutant
def _a_token_is_dropped_on_its_way_to_its_expert() -> Patches:
    exchange = exchanging.exchange

    def dropped(rows: Tensor, *args: Any) -> Tensor:
        kept = torch.ones(len(rows), 1, dtype=rows.dtype)
        kept[:1] = 0.0
        return exchange(rows * kept, *args)

    yield patch.object(dispatch, "exchange", dropped)


@mutant
def _gradients_of_experts_are_averaged() -> Patches:
    """Over the ranks of EP, whose tokens they come from."""
    backward = exchanging._Exchange.backward

    def averaged(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ours, *rest = backward(ctx, gradient)
        return ours / ctx.group.size(), *rest

    yield patch.object(exchanging._Exchange, "backward", staticmethod(averaged))


@mutant
def _replicated_experts_average_their_gradients() -> Patches:
    def halve(_: None, unit: ReplicatedUnit) -> None:
        if unit._flat is not None and any("experts" in local.name for local in unit.locals):
            assert unit._group is not None
            unit._flat /= unit._group.size()

    yield wrapped(ReplicatedUnit, "finish", halve)


@mutant
def _experts_are_summed_over_the_ranks_of_the_layer() -> Patches:
    """Instead of those that hold the same experts."""

    def everywhere(found: list[Any], maker: Any, part: Any) -> list[Any]:
        return [replace(spread, data_group="data") for spread in found]

    yield wrapped(making.UnitMaker, "_spreads", everywhere)


@mutant
def _routers_miss_the_tokens_of_one_rank() -> Patches:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = exchanging._gathered(gradient, ctx.count, ctx.group)
        if whole.shape[1] == 2:  # weights of the chosen experts
            whole[-(-ctx.count // ctx.group.size()) :] = 0.0
        return whole, None

    yield patch.object(exchanging._SliceTokens, "backward", staticmethod(backward))


@mutant
def _norms_of_heads_keep_partial_gradients() -> Patches:
    split = splitting.split
    yield patch.object(assembly, "split", lambda *args: replace(split(*args), partial=frozenset()))


@mutant
def _packed_projections_are_split_as_plain_ones() -> Patches:
    def plain(tables: Any) -> Any:
        return None if tables is None else tuple(replace(table, parts=1) for table in tables)

    tables = dispatch.expert_tables
    yield patch.object(dispatch, "expert_tables", lambda *args: plain(tables(*args)))


@mutant
def _a_rank_without_tokens_has_no_gradients() -> Patches:
    outputs = dispatch._Dispatch._outputs

    def nothing(self: Any, copies: Tensor, experts: Tensor) -> Tensor:
        return outputs(self, copies, experts) if len(copies) else copies * 1.0

    yield patch.object(dispatch._Dispatch, "_outputs", nothing)


@mutant
def _each_rank_counts_its_own_rows() -> Patches:
    """The balance of experts on a rank, instead of that of the micro-batch."""
    term = Balance.term
    yield patch.object(Balance, "term", lambda self, tally, _: term(self, tally, lambda own: own))


@mutant
def _the_term_is_added_for_each_micro_batch() -> Patches:
    yield patch.object(pipeline, "_loss", lambda outputs, batch: sum(outputs[1:], start=outputs[0] / batch.targets))


@mutant
def _biases_of_experts_are_added_by_each_rank() -> Patches:
    yield patch.object(splitting._Splitter, "added_bias", lambda splitter, rule: None)


@mutant
def _biases_of_experts_keep_partial_gradients() -> Patches:
    def without(done: splitting.SplitParameters, *_: Any) -> splitting.SplitParameters:
        return replace(done, partial=frozenset(name for name in done.partial if not name.endswith("down_proj_bias")))

    yield wrapped(assembly, "split", without)
