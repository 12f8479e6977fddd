"""Layers and strategies as arrays, so that a whole table of costs is a few array expressions.

Layer arrays have shape (T, 1), strategy arrays (S,): their products are (T, S) tables, one row a kind of layer. What a
profile may have measured for each strategy is (T, S) from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import (
    LAYER_SWITCHES,
    Axis,
    Cluster,
    Kind,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    Strategy,
)
from galvatron.core.spec.tuning import Tuning
from galvatron.planner.cost.columns import (
    ContextColumns,
    GradeColumns,
    LossColumns,
    context_columns,
    grade_columns,
    loss_columns,
)
from galvatron.planner.cost.communication import Floats, GroupLinks
from galvatron.planner.cost.layer_times import measured_times

__all__ = [
    "Bools",
    "ExpertColumns",
    "ExpertGroups",
    "Integers",
    "LayerArrays",
    "Places",
    "StrategyArrays",
    "expert_groups",
    "layer_arrays",
    "strategy_arrays",
]

Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Places = NDArray[np.intp]

_WRITTEN_AND_READ = 2.0
"""Times that memory moves a byte which is recomputed, where forward's own traffic is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertColumns:
    """Of the figures of each kind of layer, the part of its experts; zero for a layer without."""

    parameters: Floats
    trained: Floats
    """1 where they train, 0 where they are frozen."""
    activation_bytes: Floats
    replicated_activation_bytes: Floats
    dispatch_bytes: Floats
    imbalance: Floats
    tp_forward_collectives: Floats
    """Of the layer's all-reduces, those that experts with axes of their own do not do."""
    tp_backward_collectives: Floats
    forward_s: Floats
    """(T, S) of one sample on the busiest device, of the layer's the part inside experts with axes of their own."""
    backward_s: Floats
    rest_forward_s: Floats
    """(T, S) … and the part outside them."""
    rest_backward_s: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerArrays:
    """The model's kinds of layer as columns; sizes for one sample."""

    split_parameters: Floats
    replicated_parameters: Floats
    tied_parameters: Floats
    shared_parameters: Floats
    """Of the first layer: those that later layers are tied to."""
    frozen_split_parameters: Floats
    """Of the four, those that do not train."""
    frozen_replicated_parameters: Floats
    frozen_tied_parameters: Floats
    frozen_shared_parameters: Floats
    first: Floats
    """1 for a kind that is the model's first layer and no other: its gradient is the last that backward makes."""
    has_backward: Floats
    """0 where gradients do not reach the layer, for nothing in it nor before it trains."""
    forward_s: Floats
    """Of one sample, of the part that one device computes: already divided by TP."""
    backward_s: Floats
    forward_fixed_s: Floats
    """However few the samples."""
    backward_fixed_s: Floats
    forward_least_s: Floats
    """What samples and fixed part together take at least."""
    backward_least_s: Floats
    recompute_s: Floats
    """Of recomputing, besides a second forward."""
    split_activation_bytes: Floats
    replicated_activation_bytes: Floats
    input_bytes: Floats
    boundary_bytes: Floats
    transient_bytes: Floats
    measured_activation_bytes: Floats
    """On one device; not a number where it was not measured."""
    measured_transient_bytes: Floats
    splits: Floats
    """1 where tensor parallelism divides the layer, 0 where each rank computes it whole."""
    tp_forward_collectives: Floats
    tp_backward_collectives: Floats
    tp_message_bytes: Floats
    experts: ExpertColumns
    fused: LossColumns
    selective: GradeColumns
    but_attention: GradeColumns
    context: ContextColumns
    before: Integers
    """(T,) the kind of the layer before one of this kind; −1 where there is none."""
    after: Integers

    def at(self, rows: Places, columns: Places) -> LayerArrays:
        """These kinds alone, in ascending order, under these strategies; other neighbours are lost."""

        def taken(table: Any) -> Any:
            if isinstance(table, ExpertColumns | LossColumns | GradeColumns | ContextColumns):
                return type(table)(**{each.name: taken(getattr(table, each.name)) for each in fields(table)})
            return table[rows] if table.ndim == 1 or table.shape[1] == 1 else table[rows[:, None], columns]

        held = {each.name: getattr(self, each.name) for each in fields(self)}
        places = np.full(len(self.before) + 1, -1)
        places[rows] = np.arange(len(rows))
        moved = {name: places[held.pop(name)[rows]] for name in ("before", "after")}
        kept = {name: taken(each) for name, each in held.items()}
        return LayerArrays(**kept, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """The groups of axes that experts have of their own."""

    ep: GroupLinks
    dp: GroupLinks
    sdp: GroupLinks
    tp: GroupLinks

    def at(self, places: Places) -> ExpertGroups:
        """Of these axes, each of which may be there several times."""
        return ExpertGroups(**{each.name: getattr(self, each.name).at(places) for each in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyArrays:
    """The strategies of one stage size: degrees, switches, and the links of each axis' groups."""

    data: Floats
    """Into how many parts the tokens of a micro-batch are divided: its samples by DP and SDP, each by context axes."""
    dp: GroupLinks
    """Sums gradients of parameters that each rank holds: DP, and context axes that no SDP shards over."""
    sdp: GroupLinks
    """Shards parameters: SDP with context axes, or these alone under ZeRO-3."""
    tp: GroupLinks
    ring: GroupLinks
    """For passes from rank to rank."""
    ulysses: GroupLinks
    own: Bools
    """Whether the experts have axes of their own."""
    recompute: Bools
    selective_recompute: Bools
    recompute_but_attention: Bools
    offload: Bools
    fused_loss: Bools
    float8: Bools
    sequence_parallel: Bools
    zero2: Bools
    zero3: Bools

    def at(self, places: Places) -> StrategyArrays:
        """These strategies, each of which may be there several times."""

        def taken(value: Any) -> Any:
            return value.at(places) if isinstance(value, GroupLinks) else value[places]

        return StrategyArrays(**{each.name: taken(getattr(self, each.name)) for each in fields(self)})


def layer_arrays(
    model: ModelSpec, cluster: Cluster, profile: ModelProfile | None, strategies: Sequence[Strategy]
) -> LayerArrays:
    """The kinds of layer of a model as arrays, for these strategies."""
    kinds = model.kinds
    feeds: dict[str, int] = {kinds[0].name: kinds[0].boundary_bytes}
    for before, after in zip(model.layers, model.layers[1:], strict=False):
        feeds[after.name] = max(feeds.get(after.name, 0), before.boundary_bytes)
    variants = [
        (
            strategy.degree(Kind.TP),
            strategy.sequence_parallel,
            bool(strategy.sharding_factors),
            bool(strategy.experts),
            strategy.fused_loss,
            strategy.float8,
        )
        for strategy in strategies
    ]
    measured = {
        (kind.name, variant): measured_times(kind, variant, model, cluster, profile)
        for kind in kinds
        for variant in dict.fromkeys(variants)
    }
    distinct = {variant: number for number, variant in enumerate(dict.fromkeys(variants))}
    table = np.array([[measured[kind.name, variant] for variant in distinct] for kind in kinds], dtype=np.float64)
    columns = np.moveaxis(table[:, [distinct[variant] for variant in variants]], 2, 0)
    forward_s, backward_s, *fixed_and_least, recompute_s, activations, transients = columns
    forward_fixed_s, backward_fixed_s, forward_least_s, backward_least_s = fixed_and_least
    tensor = [kind.tensor_parallel for kind in kinds]

    def column(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)[:, None]

    tuning = [kind.tuning or Tuning() for kind in kinds]
    shared = [max(kind.tied_parameters for kind in kinds), *([0] * (len(kinds) - 1))]
    frozen_shared = [max(own.frozen_tied_parameters for own in tuning), *([0] * (len(kinds) - 1))]
    whole = [kind.parameters if kind.tensor_parallel is None else kind.replicated_parameters for kind in kinds]
    frozen_whole = [
        own.frozen_parameters if kind.tensor_parallel is None else own.frozen_replicated_parameters
        for kind, own in zip(kinds, tuning, strict=True)
    ]
    names = [layer.name for layer in model.layers]
    experts = _expert_columns(kinds, strategies, forward_s, backward_s)
    own = np.array([bool(strategy.experts) for strategy in strategies])
    roofline = cluster.device.roofline(model.training.precision, compiled=model.training.compile)
    traffic = _WRITTEN_AND_READ if roofline is None else roofline.traffic
    return LayerArrays(
        split_parameters=column([kind.parameters - rest for kind, rest in zip(kinds, whole, strict=True)]),
        replicated_parameters=column(whole),
        tied_parameters=column([kind.tied_parameters for kind in kinds]),
        shared_parameters=column(shared),
        frozen_split_parameters=column(
            [own.frozen_parameters - rest for own, rest in zip(tuning, frozen_whole, strict=True)]
        ),
        frozen_replicated_parameters=column(frozen_whole),
        frozen_tied_parameters=column([own.frozen_tied_parameters for own in tuning]),
        frozen_shared_parameters=column(frozen_shared),
        first=column([kind.name == model.layers[0].name and names.count(kind.name) == 1 for kind in kinds]),
        has_backward=column([own.backward for own in tuning]),
        forward_s=np.where(own, experts.forward_s + experts.rest_forward_s, forward_s),
        backward_s=np.where(own, experts.backward_s + experts.rest_backward_s, backward_s),
        forward_fixed_s=forward_fixed_s,
        backward_fixed_s=backward_fixed_s,
        forward_least_s=forward_least_s,
        backward_least_s=backward_least_s,
        recompute_s=recompute_s,
        split_activation_bytes=column([kind.split_activation_bytes for kind in kinds]),
        replicated_activation_bytes=column([kind.replicated_activation_bytes for kind in kinds]),
        input_bytes=column([feeds[kind.name] for kind in kinds]),
        boundary_bytes=column([kind.boundary_bytes for kind in kinds]),
        transient_bytes=column([kind.transient_bytes for kind in kinds]),
        measured_activation_bytes=activations,
        measured_transient_bytes=transients,
        splits=column([0 if tp is None else 1 for tp in tensor]),
        tp_forward_collectives=column([0 if tp is None else tp.forward_collectives for tp in tensor]),
        tp_backward_collectives=column([0 if tp is None else tp.backward_collectives for tp in tensor]),
        tp_message_bytes=column([0 if tp is None else tp.message_bytes for tp in tensor]),
        experts=experts,
        fused=loss_columns(model, cluster, profile),
        selective=grade_columns(kinds, [kind.selective for kind in kinds], profile, "rs", traffic),
        but_attention=grade_columns(kinds, [kind.but_attention for kind in kinds], profile, "ra", traffic),
        context=context_columns(kinds),
        before=_neighbours(model, -1),
        after=_neighbours(model, 1),
    )


def _expert_columns(
    kinds: Sequence[LayerSpec], strategies: Sequence[Strategy], forward_s: Floats, backward_s: Floats
) -> ExpertColumns:
    """The experts' part of each kind, from what a layer takes whose experts follow the rest of it.

    Tokens are conserved: all devices of a stage together do the experts' work once, even where TP computes the rest of
    the layer whole on each rank. The busiest device has more than its share, by the imbalance.
    """

    def column(name: str, absent: float = 0.0) -> Floats:
        return np.array([[absent if kind.experts is None else getattr(kind.experts, name)] for kind in kinds], float)

    def replaced(name: str) -> Floats:
        """No more all-reduces than the layer has."""
        whole = [[0 if kind.tensor_parallel is None else getattr(kind.tensor_parallel, name)] for kind in kinds]
        fewer: Floats = np.minimum(column(name), np.array(whole, float))
        return fewer

    tensor = np.array([strategy.degree(Kind.TP) for strategy in strategies], dtype=np.float64)
    splits = np.array([[kind.tensor_parallel is not None] for kind in kinds])
    share = column("forward_flops") / np.array([[max(kind.forward_flops, 1)] for kind in kinds], float)
    inside = share * column("imbalance", 1.0) / np.where(splits, 1.0, tensor)
    return ExpertColumns(
        parameters=column("parameters"),
        trained=np.array([[not (kind.tuning and kind.tuning.frozen_expert_parameters)] for kind in kinds], float),
        activation_bytes=column("activation_bytes"),
        replicated_activation_bytes=column("replicated_activation_bytes"),
        dispatch_bytes=column("dispatch_bytes"),
        imbalance=column("imbalance", 1.0),
        tp_forward_collectives=replaced("forward_collectives"),
        tp_backward_collectives=replaced("backward_collectives"),
        forward_s=forward_s * inside,
        backward_s=backward_s * inside,
        rest_forward_s=forward_s * (1 - share),
        rest_backward_s=backward_s * (1 - share),
    )


def _neighbours(model: ModelSpec, step: int) -> Integers:
    """Kinds beside each kind. The model's first and last layer have neighbours of their own; others are held to be
    among their like, as most layers of a model are."""
    numbers = {kind.name: number for number, kind in enumerate(model.kinds)}
    kinds = [numbers[layer.name] for layer in model.layers]
    found = np.arange(len(model.kinds))
    for place in (0, len(kinds) - 1):
        if kinds.count(kinds[place]) == 1:
            found[kinds[place]] = kinds[place + step] if 0 <= place + step < len(kinds) else -1
    return found


def strategy_arrays(strategies: Sequence[Strategy], cluster: Cluster) -> StrategyArrays:
    """These strategies as arrays, with the links that each axis spans on the cluster."""

    def groups(kind: Kind) -> GroupLinks:
        return GroupLinks.of([strategy.factors(kind) for strategy in strategies], cluster)

    sharded = [each.sharding_factors if each.gathers_parameters else frozenset() for each in strategies]
    summed = [each.gradient_factors - shards for each, shards in zip(strategies, sharded, strict=True)]
    switches = np.array([each.switches for each in strategies], dtype=np.bool_).T.copy()
    return StrategyArrays(
        data=np.array([each.data_degree * each.context_degree for each in strategies], dtype=np.float64),
        dp=GroupLinks.of(summed, cluster),
        sdp=GroupLinks.of(sharded, cluster),
        tp=groups(Kind.TP),
        ring=GroupLinks.rings_of([each.factors(Kind.RING) for each in strategies], cluster),
        ulysses=groups(Kind.ULYSSES),
        own=np.array([bool(strategy.experts) for strategy in strategies]),
        **{each.name: column for each, column in zip(LAYER_SWITCHES, switches, strict=True)},
    )


def expert_groups(axes: Sequence[tuple[Axis, ...]], cluster: Cluster) -> ExpertGroups:
    """Axes that experts have of their own, with the links that they span on the cluster."""
    alone = [Strategy(experts=each) for each in axes]

    def groups(kind: Kind) -> GroupLinks:
        return GroupLinks.of([each.expert_factors(kind) for each in alone], cluster)

    return ExpertGroups(ep=groups(Kind.EP), dp=groups(Kind.DP), sdp=groups(Kind.SDP), tp=groups(Kind.TP))
