"""What experts with axes of their own add to the price of their layer (docs/cost-model.md, "Experts").

Over the factors T of the layer's TP all ranks hold the same tokens. The experts' TP, T', is part of T; the ranks of
T∖T' divide the tokens among them, an all-to-all over EP brings copies of them to their experts and back, and an
all-gather makes them whole again. Expert parameters are divided by EP and T', and replicated or sharded over the
experts' own DP and SDP.

Context axes divide tokens as data axes do. All of it depends on the strategy of the layer only through its TP, sequence
parallelism, recompute, and whether it has context axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from galvatron.core.spec import (
    GRADIENT_BYTES,
    Axis,
    Cluster,
    Factors,
    Kind,
    LayerSpec,
    ModelProfile,
    Precision,
    Strategy,
)
from galvatron.planner.cost import computation, memory
from galvatron.planner.cost.arrays import Places, expert_groups, layer_arrays, strategy_arrays
from galvatron.planner.cost.communication import (
    Floats,
    GroupLinks,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    overlapped_s,
    reduce_scatter_s,
)
from galvatron.planner.cost.conventions import working_sets
from galvatron.planner.cost.grades import full_activation_bytes
from galvatron.planner.cost.inputs import CostInputs
from galvatron.planner.cost.tables import NEVER, Distinct, Integers, LayerCosts, Tables, rounded_up

__all__ = ["ExpertCosts", "ExpertPairs"]


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Strategies and axes for the experts, and which of them go together."""

    strategies: Sequence[Strategy]
    axes: Sequence[tuple[Axis, ...]]
    strategy_of: Places
    """(S,) for each pair."""
    axes_of: Places

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> ExpertPairs:
        """Strategies with the axes that each of them has."""
        everywhere = np.arange(len(strategies))
        return cls(strategies, [strategy.experts for strategy in strategies], everywhere, everywhere)


class ExpertCosts:
    """Prices of the experts' axes of strategies; rows are the kinds of layer that have experts."""

    def __init__(self, cost: CostInputs, pairs: ExpertPairs, pipeline_degree: int) -> None:
        self.cost = cost
        kinds = cost.model.kinds
        self.rows: Places = np.array([row for row, kind in enumerate(kinds) if kind.experts], dtype=np.intp)
        """The kinds that have experts."""
        owning = [each if each.experts else replace(each, experts=pairs.axes[0]) for each in pairs.strategies]
        layers = layer_arrays(cost.model, cost.cluster, cost.profile, owning)
        self._layers = layers.at(self.rows, pairs.strategy_of)
        self._arrays = strategy_arrays(pairs.strategies, cost.cluster).at(pairs.strategy_of)
        self._groups = expert_groups(pairs.axes, cost.cluster).at(pairs.axes_of)
        self._slices = _token_slices(pairs, cost.cluster)
        """The ranks that divide among them the tokens that all of them hold."""
        alone = [Strategy(experts=axes) for axes in pairs.axes]
        allowed = [[kinds[row].allows_experts(each) for each in alone] for row in self.rows]
        self._allowed = np.array(allowed, dtype=bool).reshape(len(self.rows), len(alone))[:, pairs.axes_of]
        self._pipelined = pipeline_degree > 1
        self._held: Floats = self._layers.experts.parameters / (self._groups.ep.size * self._groups.tp.size)
        """(K, S) expert parameters on one device before SDP shards them."""
        self._shard = self._held / self._groups.sdp.size
        self._sharded = self._groups.sdp.size > 1
        replicas = self._groups.dp.size if cost.conventions.distributed_optimizer else 1.0
        self._owned = self._shard / replicas
        """Those of them whose optimizer states a device has."""
        precision, groups = cost.model.training.precision, self._groups
        degrees = groups.ep.size.astype(int).tolist()
        self._dispatch = _dispatch_times([kinds[row] for row in self.rows], degrees, cost.profile)
        self._exchange_fixed_s = self._exchange_s(np.zeros(1))
        self._exchange_sample_s = self._exchange_s(np.ones(1)) - self._exchange_fixed_s
        self._gather_s = all_gather_s(self._held * precision.bytes, groups.sdp)
        trained, back = self._layers.experts.trained, self._layers.has_backward
        scatter_s = trained * reduce_scatter_s(self._held * GRADIENT_BYTES, groups.sdp)
        self._each_backward_s = back * self._gather_s + scatter_s
        self._with_sync_s = self._each_backward_s + trained * all_reduce_s(self._shard * GRADIENT_BYTES, groups.dp)
        copy_bytes = precision.bytes * (~self._sharded & (precision is Precision.BF16))
        self._states: Floats = np.where(
            trained > 0,
            self._owned * cost.optimizer.bytes_per_parameter
            + (self._shard - self._owned) * GRADIENT_BYTES
            + self._held * copy_bytes,
            self._shard * precision.bytes,
        )
        """In bf16 a working copy stays beside the states unless SDP gathers it. Of frozen ones it is all there is."""
        self._saved_bytes = back * np.where(self._arrays.recompute, 0.0, self._full_bytes)
        self._work_bytes = self._sample_work_bytes()

    def layer_costs(self, micro_batch: Integers) -> LayerCosts:
        """What a micro-batch takes longer, by what the time is spent on: (…, K, S).

        What the experts gather, scatter and sum hides behind the computation of the rest of the layer.
        """
        cluster, columns = self.cost.cluster, self._layers.experts
        slowdown = cluster.overlap_slowdown
        samples = micro_batch / self._arrays.data
        forward = samples * columns.rest_forward_s
        backward = samples * columns.rest_backward_s + self._arrays.recompute * forward
        gather_exposed = self._gather_s
        if self.cost.conventions.gather_ahead:
            gather_exposed = overlapped_s(forward, self._gather_s, slowdown) - forward
        with_scatter = overlapped_s(backward, self._each_backward_s, slowdown)
        nothing = np.zeros((1, 1))
        return LayerCosts(
            compute_s=nothing,
            tp_s=nothing,
            cp_s=nothing,
            ep_s=samples * self._exchange_sample_s + self._exchange_fixed_s,
            sdp_s=gather_exposed + (with_scatter - backward),
            sync_s=overlapped_s(backward, self._with_sync_s, slowdown) - with_scatter,
            optimizer_s=computation.step_s(columns.trained * self._owned, cluster.device, self.cost.optimizer),
        )

    def _exchange_s(self, samples: Floats) -> Floats:
        """What tokens take on their way to the experts and back: in forward, in backward, and in forward again where
        the layer is recomputed.

        The busiest rank receives more than its share of the copies, by the imbalance. Each forward begins with an
        all-to-all of how many will come. Ranks of T' sum tokens, not copies: the router's weights are applied before.
        Under sequence parallelism a rank holds its part of the sequence already, and nothing is made whole afterwards.
        """
        groups, columns, again = self._groups, self._layers.experts, self._arrays.recompute
        tokens = samples * self._layers.boundary_bytes
        copies = samples / self._slices.size * columns.dispatch_bytes * columns.imbalance
        whole_s = np.where(self._arrays.sequence_parallel, 0.0, all_gather_s(tokens, self._slices))
        summed_s = all_reduce_s(tokens / self._slices.size, groups.tp)
        counts_s = all_to_all_s(np.zeros(1), groups.ep)
        back = self._layers.has_backward
        seconds: Floats = (1 + back * (1 + again)) * (2 * all_to_all_s(copies, groups.ep) + summed_s + whole_s)
        here, part = self._dispatch, samples / self._slices.size
        forward_s = counts_s + part * here.forward_s + here.forward_fixed_s
        return seconds + (1 + back * again) * forward_s + back * (part * here.backward_s + here.backward_fixed_s)

    def tables(self, micro_batch: Integers, micro_batches: Integers) -> Tables:
        """Integer tables of what the experts add, (…, K, S)."""
        sizes, micro_batches = Distinct(micro_batch), micro_batches[..., None, None]
        time = self.layer_costs(sizes.figures[:, None, None]).mean_ns(sizes, micro_batches)
        samples = micro_batch[..., None, None] / self._arrays.data
        saved = samples * self._saved_bytes
        flying = samples * working_sets(micro_batches, self.cost.conventions, pipelined=self._pipelined)
        return Tables(
            time_ns=np.where(self._allowed, time, NEVER),
            state_bytes=rounded_up(self._state_bytes(saved, micro_batches)),
            activation_bytes=rounded_up(saved),
            transient_bytes=rounded_up(self._transient_bytes(flying)),
        )

    def least_state_bytes(self) -> Integers:
        """(K,) no choice needs less for the states of the experts, whatever batch and micro-batches are."""
        early = self._states - np.where(self._sharded, GRADIENT_BYTES * self._shard, 0.0)
        least: Integers = np.floor(np.where(self._allowed, early, NEVER).min(axis=1)).astype(np.int64)
        return least

    def parts(self) -> Floats:
        """(parts, S) all that the prices grow with whatever batch and micro-batches are; infinite where not allowed.

        Exchanging tokens takes so long for the first sample of a micro-batch and for each more. What experts gather and
        scatter in each micro-batch and sum once an iteration hides behind the same computation, so that sums of it
        count. A gradient's place may be made late, so that states count with and without it. Activations and buffers of
        tokens grow with what a rank has of them. The buffers of sharded experts lie where activations were: fewer
        activations would make more of them, so sharded ones are compared only where they have equally many.
        """
        parts = (
            self._exchange_sample_s + self._exchange_fixed_s,
            self._exchange_sample_s,
            self._gather_s,
            self._each_backward_s,
            self._with_sync_s,
            self._shard,
            self._owned,
            self._states,
            self._states - np.where(self._sharded, GRADIENT_BYTES * self._shard, 0.0),
            1 / self._slices.size,
            self._sharded * self._held,
            self._sharded * self._slices.size,
        )
        table = np.stack([np.where(self._allowed, part, np.inf) for part in parts])
        return table.reshape(-1, table.shape[-1])

    def _state_bytes(self, saved: Floats, micro_batches: Integers) -> Floats:
        """States of the experts' parameters; where gradients are late, a shard's takes the place of what tokens
        saved."""
        late = self.cost.late_gradients(micro_batches, pipelined=self._pipelined)
        if not late.any():
            return self._states
        gradient = np.minimum(GRADIENT_BYTES * self._shard, saved)
        total: Floats = self._states - np.where(late & self._sharded, gradient, 0.0)
        return total

    @property
    def _full_bytes(self) -> Floats:
        """What one sample's tokens save for their experts on the busiest rank, without recompute: they are divided by
        T∖T', and what they save inside an expert also by T'."""
        columns, groups = self._layers.experts, self._groups
        inside = columns.activation_bytes / groups.tp.size + columns.replicated_activation_bytes
        total: Floats = columns.imbalance * inside / self._slices.size
        return total

    def _transient_bytes(self, samples: Floats) -> Floats:
        """The work of the whole layer on the busiest rank, copies of tokens that it sends and receives, and under SDP
        of the experts what sharding adds, as for a layer: gathered parameters, the gradient, and the fp32 buffer that
        it is reduced from, in the place of activations that are gone.

        FSDP2 gathers the unit ahead, which is the rest of the layer before: no second layer's experts are gathered.
        """
        conventions, precision = self.cost.conventions, self.cost.model.training.precision
        work = samples * self._work_bytes
        gathers = self._sharded & conventions.sdp_buffers_in_backward
        whole = precision.bytes * self._held
        growing = np.maximum(whole * memory.EARLY_GRADIENT, whole - work)
        buffer = np.maximum(GRADIENT_BYTES * self._held - samples * self._saved_bytes, 0)
        kept = self._sharded * conventions.largest_layers_kept * whole
        total: Floats = work + np.where(gathers, whole + growing + buffer, 0) + kept
        return total

    def _sample_work_bytes(self) -> Floats:
        """Gradients inside the layer's backward, copies of tokens, and what recompute restores, of one sample."""
        layers, arrays, columns = self._layers, self._arrays, self._layers.experts
        outside = np.maximum(full_activation_bytes(layers, arrays) - memory.following_expert_bytes(layers, arrays), 0.0)
        restored = arrays.recompute * (outside + self._full_bytes)
        copies = (1 + columns.imbalance) * columns.dispatch_bytes / self._slices.size
        inside = columns.imbalance * memory.working_bytes(layers, arrays, self.cost.conventions)
        total: Floats = inside + copies + restored
        return total


def _token_slices(pairs: ExpertPairs, cluster: Cluster) -> GroupLinks:
    """T∖T' of each pair."""
    layer = [strategy.factors(Kind.TP) for strategy in pairs.strategies]
    own = [Strategy(experts=axes).expert_factors(Kind.TP) for axes in pairs.axes]
    known: dict[tuple[Factors, Factors], Factors] = {}
    slices = []
    for of_layer, of_experts in zip(pairs.strategy_of.tolist(), pairs.axes_of.tolist(), strict=True):
        key = layer[of_layer], own[of_experts]
        if key not in known:
            known[key] = key[0] - key[1]
        slices.append(known[key])
    return GroupLinks.of(slices, cluster)


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """What a layer takes longer at some degree of EP than at the best one that was measured: sorting copies, and
    products of fewer experts with more tokens each. (K, S) seconds."""

    forward_s: Floats
    """Of one sample."""
    backward_s: Floats
    forward_fixed_s: Floats
    """However few the samples: than without EP."""
    backward_fixed_s: Floats


def _dispatch_times(kinds: Sequence[LayerSpec], degrees: Sequence[int], profile: ModelProfile | None) -> _Dispatch:
    """At these degrees, each as at the largest that was measured and is not above it; nothing without a profile."""
    table = np.zeros((4, len(kinds), len(degrees)))
    for row, kind in enumerate(kinds):
        known = profile.expert_times(kind.untuned().name) if profile else {}
        whole = profile.time_of(kind.untuned().name) if profile else None
        if not known or whole is None:
            continue
        seconds = {ep: (time.forward_s, time.forward_s * time.backward_ratio) for ep, time in known.items()}
        fixed = {ep: (time.forward_fixed_s or 0.0, time.backward_fixed_s or 0.0) for ep, time in known.items()}
        least = (*np.min(list(seconds.values()), axis=0), whole.forward_fixed_s or 0.0, whole.backward_fixed_s or 0.0)
        for column, degree in enumerate(degrees):
            nearest = max((ep for ep in seconds if ep <= degree), default=min(seconds))
            table[:, row, column] = np.maximum(np.subtract((*seconds[nearest], *fixed[nearest]), least), 0.0)
    return _Dispatch(*table)
