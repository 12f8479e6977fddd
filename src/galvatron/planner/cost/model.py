"""The cost model: all formula families put together into integer tables for the search.

Times are whole nanoseconds and memory whole bytes, rounded up, so that sums are exact in any order and plans are
identical from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import (
    GRADIENT_BYTES,
    Cluster,
    Factors,
    Kind,
    Layout,
    ModelProfile,
    ModelSpec,
    OptimizerSpec,
    Strategy,
    degree_of,
    optimizer_named,
)
from galvatron.planner.cost import computation, memory
from galvatron.planner.cost.arrays import layer_arrays, strategy_arrays
from galvatron.planner.cost.communication import (
    Floats,
    GroupLinks,
    all_gather_s,
    all_reduce_s,
    overlapped_s,
    reduce_scatter_s,
    transfer_s,
)
from galvatron.planner.cost.conventions import Conventions
from galvatron.planner.cost.slice_gather import layout_rates
from galvatron.planner.cost.tied import Resplit, resplit_bytes, resplit_s

__all__ = ["NEVER", "CostModel", "Integers", "LayerCosts", "StageCosts", "Tables"]

Integers = NDArray[np.int64]
NEVER = 1 << 44
"""Nanoseconds or bytes of what cannot be done; sums of thousands still fit an int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Where the time of one micro-batch goes, each (…, T, S) in seconds; communication is what stays exposed."""

    compute_s: Floats
    tp_s: Floats
    sdp_s: Floats
    sync_s: Floats
    """Once an iteration: gradient synchronisation of DP and of tied weights, gathering of ZeRO-2."""
    optimizer_s: Floats
    """Once an iteration."""

    @property
    def steady_s(self) -> Floats:
        return self.compute_s + self.tp_s + self.sdp_s

    @property
    def once_s(self) -> Floats:
        return self.sync_s + self.optimizer_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Costs of each kind of layer under each strategy, (…, T, S)."""

    time_ns: Integers
    """Mean time of a micro-batch, its share of once-an-iteration work included; NEVER where not allowed."""
    state_bytes: Integers
    activation_bytes: Integers
    """Of one micro-batch in flight."""
    transient_bytes: Integers


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Prices a model on a cluster."""

    model: ModelSpec
    cluster: Cluster
    conventions: Conventions
    profile: ModelProfile | None = None

    @property
    def optimizer(self) -> OptimizerSpec:
        return optimizer_named(self.model.training.optimizer)

    def forward_s(self) -> Floats:
        """(T,) forward time of one sample of each kind of layer on one device."""
        return layer_arrays(self.model, self.cluster, self.profile, [Strategy()]).forward_s[:, 0]

    def stage(self, strategies: Sequence[Strategy], pipeline_degree: int) -> StageCosts:
        return StageCosts(self, tuple(strategies), pipeline_degree)


class StageCosts:
    """Prices of all strategies of one stage size."""

    def __init__(self, cost: CostModel, strategies: tuple[Strategy, ...], pipeline_degree: int) -> None:
        self.cost = cost
        self.strategies = strategies
        self.devices = cost.cluster.devices // pipeline_degree
        self.layouts: tuple[Layout, ...] = tuple(dict.fromkeys(strategy.layout for strategy in strategies))
        """What changes and transfers cost by: the layout of the activations."""
        numbers = {layout: number for number, layout in enumerate(self.layouts)}
        self.layout_of: Integers = np.array([numbers[strategy.layout] for strategy in strategies])
        self.data_degree: Integers = np.array([strategy.data_degree for strategy in strategies])
        self._layers = layer_arrays(cost.model, cost.cluster, cost.profile, strategies)
        self._arrays = strategy_arrays(strategies, cost.cluster)
        self._tied_elsewhere = pipeline_degree > 1
        self._allowed = np.array([[cost.model.allows(kind, s) for s in strategies] for kind in cost.model.kinds])
        self._rates = layout_rates(self.layouts, cost.cluster, always_factor_by_factor=not cost.conventions.counts_rows)
        whole: Factors = frozenset()
        tensor = [strategy.factors(Kind.TP) for strategy in strategies]
        self.splits: tuple[Factors, ...] = tuple(dict.fromkeys([whole, *tensor]))
        """Ways to split a weight: not at all, or over the factors of a TP axis."""
        numbered = {split: number for number, split in enumerate(self.splits)}
        self.split_of: Integers = np.array(
            [[numbered[factors if kind.tensor_parallel else whole] for factors in tensor] for kind in cost.model.kinds]
        )
        """(T, S) how each kind's weights are split."""
        self._stage_link = cost.cluster.stage_link(self.devices) if pipeline_degree > 1 else None

    def layer_costs(self, micro_batch: NDArray[np.int64]) -> LayerCosts:
        """Time of one micro-batch by what it is spent on; ``micro_batch`` broadcasts in front of (T, S)."""
        layers, arrays, cluster = self._layers, self._arrays, self.cost.cluster
        conventions, precision = self.cost.conventions, self.cost.model.training.precision
        samples = micro_batch / arrays.data
        forward = computation.forward_s(samples, layers)
        backward = computation.backward_s(samples, layers, arrays)

        message = samples * layers.tp_message_bytes
        gather_s = all_gather_s(message, arrays.tp)
        reduce_s = np.where(
            arrays.sequence_parallel, reduce_scatter_s(message, arrays.tp) + gather_s, all_reduce_s(message, arrays.tp)
        )
        tp_forward = layers.tp_forward_collectives * reduce_s
        tp_again = (
            layers.tp_forward_collectives * arrays.recompute * reduce_s
            + layers.tp_backward_collectives * arrays.sequence_parallel * gather_s
        )  # recompute repeats forward; sequence parallelism gathers inputs again for the weights' gradients
        tp_s = tp_forward + layers.tp_backward_collectives * reduce_s + tp_again

        parameters = computation.local_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        parameter_gather = all_gather_s(parameters * precision.bytes, arrays.sdp)
        gradient_scatter = reduce_scatter_s(parameters * GRADIENT_BYTES, arrays.sdp)
        zero2_scatter = arrays.zero2 * reduce_scatter_s(parameters * GRADIENT_BYTES, arrays.dp)
        each_backward = parameter_gather + gradient_scatter + zero2_scatter
        zero2_gather = arrays.zero2 * all_gather_s(parameters * precision.bytes, arrays.dp)
        if conventions.gather_ahead:
            forward_with_gather = self._overlapped_s(forward, parameter_gather)
            gather_exposed = self._overlapped_s(forward, parameter_gather + zero2_gather) - forward_with_gather
        else:
            forward_with_gather, gather_exposed = forward + parameter_gather, zero2_gather
        backward_with_scatter = self._overlapped_s(backward, each_backward)

        shard = parameters / arrays.sdp.size
        sync = np.where(arrays.zero2, 0.0, all_reduce_s(shard * GRADIENT_BYTES, arrays.dp))
        sync_exposed = self._overlapped_s(backward, each_backward + sync) - backward_with_scatter
        return LayerCosts(
            compute_s=forward + backward,
            tp_s=tp_s,
            sdp_s=(forward_with_gather - forward) + (backward_with_scatter - backward),
            sync_s=gather_exposed + sync_exposed + self._tied_sync_s(),
            optimizer_s=computation.optimizer_s(parameters, arrays, cluster.device, self.cost.optimizer),
        )

    def _overlapped_s(self, compute_s: Floats, communicate_s: Floats) -> Floats:
        return overlapped_s(compute_s, communicate_s, self.cost.cluster.overlap_slowdown)

    def _tied_sync_s(self) -> Floats:
        """Copies of tied weights in two stages sum their gradients once an iteration."""
        layers, arrays, link = self._layers, self._arrays, self._stage_link
        if link is None or not layers.tied_parameters.any():
            return np.zeros((1, 1))
        one_pass = np.array([link.bytes_per_s]), np.array([link.latency_s])
        pair = GroupLinks(np.array([2.0]), one_pass, one_pass, one_pass)
        size = layers.tied_parameters / arrays.tp.size / arrays.sdp.size * GRADIENT_BYTES
        seconds: Floats = np.where(layers.tied_parameters > 0, all_reduce_s(size, pair), 0.0)
        return seconds

    def tables(self, micro_batch: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> Tables:
        """Integer tables for micro-batches of this many samples (all devices of the stage together)."""
        micro_batch, micro_batches = micro_batch[..., None, None], micro_batches[..., None, None]
        layers, arrays = self._layers, self._arrays
        precision, conventions = self.cost.model.training.precision, self.cost.conventions
        costs = self.layer_costs(micro_batch)
        time = np.maximum(_up((costs.steady_s + costs.once_s / micro_batches) * 1e9), 1)
        possible = self._allowed & (micro_batch % self.data_degree == 0)
        samples = micro_batch / arrays.data
        parameters = computation.local_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        shared = computation.shared_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        states = memory.state_bytes(parameters, arrays, precision, self.cost.optimizer)
        states = states + memory.shared_bytes(shared, arrays, precision, conventions)
        states = states - memory.late_gradient_bytes(samples, parameters, micro_batches, layers, arrays, conventions)
        return Tables(
            time_ns=np.where(possible, time, NEVER),
            state_bytes=_up(states),
            activation_bytes=_up(memory.activation_bytes(samples, layers, arrays)),
            transient_bytes=_up(
                memory.transient_bytes(
                    samples * self._working_sets(micro_batches),
                    memory.Weights(parameters, shared),
                    layers,
                    arrays,
                    precision,
                    conventions,
                )
            ),
        )

    def tied_places(self, kinds: Sequence[int], *, first: bool) -> list[int]:
        """Places of the layers in a stage that share a tied weight, its owner before those that use it; fewer than
        two: nobody shares one. ``first``: the stage begins with the model's first layer, to which all others are tied.
        """
        if not self.cost.conventions.prices_resplits or not self._layers.tied_parameters.any():
            return []
        return [
            place for place, kind in enumerate(kinds) if self._layers.tied_parameters[kind] or (first and not place)
        ]

    def resplit(self, micro_batch: int, owner: int) -> Resplit:
        """What layers pay to use a weight whose owner splits it in the way of this number: (T, S)."""
        layers, arrays, precision = self._layers, self._arrays, self.cost.model.training.precision
        factors = self.splits[owner]
        group = GroupLinks.of([degree_of(factors)], [factors], self.cost.cluster)
        working = memory.working_bytes(layers, arrays, self.cost.conventions)
        saved, transient = resplit_bytes(layers, arrays, group, precision, micro_batch / arrays.data * working)
        pays = (self.split_of != owner) & (layers.tied_parameters > 0)
        return Resplit(
            time_ns=np.where(pays, _up(resplit_s(layers, arrays, group, precision) * 1e9), 0),
            activation_bytes=np.where(pays, _up(saved), 0),
            transient_bytes=np.where(pays, _up(transient), 0),
        )

    def resplit_in(self, kinds: Integers, choice: Integers, micro_batch: int, *, first: bool) -> Resplit:
        """What each layer of a stage pays to use it, given kinds and strategies of its layers: (L,)."""
        owner, *users = self.tied_places(kinds.tolist(), first=first) or [0]
        tables = self.resplit(micro_batch, int(self.split_of[kinds[owner], choice[owner]]))

        def paid(table: Integers) -> Integers:
            layers = np.zeros(len(kinds), dtype=np.int64)
            layers[users] = table[kinds[users], choice[users]]
            return layers

        return Resplit(
            time_ns=paid(tables.time_ns),
            activation_bytes=paid(tables.activation_bytes),
            transient_bytes=paid(tables.transient_bytes),
        )

    def _working_sets(self, micro_batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Micro-batches whose working sets are alive at once: one without a pipeline."""
        if self._stage_link is None:
            return np.ones_like(micro_batches)
        return np.minimum(micro_batches, self.cost.conventions.pipeline_transients)

    def change_ns(self, micro_batch: int) -> Integers:
        """Slice-Gather after a layer of each kind, from layout to layout: (T, K, K)."""
        size = micro_batch * self._layers.boundary_bytes[:, :, None]
        return _up(self._rates.change_s(micro_batch, size) * 1e9)

    def transfer_ns(self, micro_batch: int) -> Integers:
        """One direction of the transfer between stages after a layer of each kind, by the receiver's layout: (T, K).

        A rank receives just the rows and the part of the sequence that its layout asks for, whatever the sender's is.
        """
        if self._stage_link is None:
            return np.zeros((len(self._layers.boundary_bytes), len(self.layouts)), dtype=np.int64)
        parts = np.array([layout.parts for layout in self.layouts])
        link = self._stage_link
        size = micro_batch / parts * self._layers.boundary_bytes
        return _up(transfer_s(size, link.bytes_per_s, link.latency_s) * 1e9)


def _up(values: Floats) -> Integers:
    """Round up, forgiving the last bits of floating point so that 3.0000000001 bytes are 3."""
    return np.ceil(values - 1e-6).astype(np.int64)
