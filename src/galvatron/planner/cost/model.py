"""The cost model: all formula families put together into integer tables for the search.

A layer's price is that of the layer, and on top that of its experts where they have axes of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import (
    GRADIENT_BYTES,
    Factors,
    Kind,
    LayerSpec,
    Layout,
    Strategy,
)
from galvatron.planner.cost import computation, grades, memory
from galvatron.planner.cost.allowed import allowed
from galvatron.planner.cost.arrays import Places, layer_arrays, strategy_arrays
from galvatron.planner.cost.communication import (
    Floats,
    GroupLinks,
    all_gather_s,
    all_reduce_s,
    overlapped_s,
    reduce_scatter_s,
    transfer_s,
)
from galvatron.planner.cost.context import Exchange, exchanges
from galvatron.planner.cost.conventions import working_sets
from galvatron.planner.cost.experts import ExpertCosts, ExpertPairs
from galvatron.planner.cost.inputs import CostInputs
from galvatron.planner.cost.slice_gather import LayoutRates, layout_rates
from galvatron.planner.cost.tables import NEVER, Distinct, Integers, LayerCosts, Number, Tables, rounded_up
from galvatron.planner.cost.tied import Resplit, resplit_bytes, resplit_s

__all__ = ["CostModel", "StageCosts"]


@dataclass(frozen=True, kw_only=True)
class CostModel(CostInputs):
    """Prices a model on a cluster."""

    def forward_s(self) -> Floats:
        """(T,) forward time of one sample of each kind of layer on one device."""
        return layer_arrays(self.model, self.cluster, self.profile, [Strategy()]).forward_s[:, 0]

    def stage(self, strategies: Sequence[Strategy], pipeline_degree: int) -> StageCosts:
        return StageCosts(self, tuple(strategies), pipeline_degree)

    def rest_of_stage(self, strategies: Sequence[Strategy], pipeline_degree: int) -> tuple[StageCosts, Places]:
        """Prices for kinds with experts, and those beside them; and where the former are among them."""
        beside = layer_arrays(self.model, self.cluster, self.profile, [Strategy()])
        own = np.array([row for row, kind in enumerate(self.model.kinds) if kind.experts], dtype=np.intp)
        rows = np.unique(np.concatenate([own, beside.before[own], beside.after[own]]))
        rows = np.arange(len(self.model.kinds)) if self.conventions.largest_layers_kept else rows[rows >= 0]
        return StageCosts(self, tuple(strategies), pipeline_degree, rows), np.searchsorted(rows, own)


class StageCosts:
    """Prices of all strategies of one stage size."""

    def __init__(
        self, cost: CostModel, strategies: tuple[Strategy, ...], pipeline_degree: int, rows: Places | None = None
    ) -> None:
        """``rows``: the kinds of layer to price, without which all are."""
        self.cost = cost
        kinds = [cost.model.kinds[row] for row in (range(len(cost.model.kinds)) if rows is None else rows)]
        self.kinds = kinds
        self.strategies = strategies
        self.devices = cost.cluster.devices // pipeline_degree
        self.layouts: tuple[Layout, ...] = tuple(dict.fromkeys(strategy.layout for strategy in strategies))
        """What changes and transfers cost by: the layout of the activations."""
        numbers = {layout: number for number, layout in enumerate(self.layouts)}
        self.layout_of: Integers = np.array([numbers[strategy.layout] for strategy in strategies])
        self.data_degree: Integers = np.array([strategy.data_degree for strategy in strategies])
        layers = layer_arrays(cost.model, cost.cluster, cost.profile, strategies)
        self._layers = layers if rows is None else layers.at(rows, np.arange(len(strategies)))
        self._arrays = strategy_arrays(strategies, cost.cluster)
        self._tied_elsewhere = pipeline_degree > 1
        self._allowed = _allowed(cost, kinds, strategies)
        self._pipeline_degree = pipeline_degree
        whole: Factors = frozenset()
        tensor = [strategy.factors(Kind.TP) for strategy in strategies]
        self.splits: tuple[Factors, ...] = tuple(dict.fromkeys([whole, *tensor]))
        """Ways to split a weight: not at all, or over the factors of a TP axis."""
        numbered = {split: number for number, split in enumerate(self.splits)}
        self.split_of: Integers = np.array(
            [[numbered[factors if kind.tensor_parallel else whole] for factors in tensor] for kind in kinds]
        )
        """(T, S) how each kind's weights are split."""
        self._stage_link = cost.cluster.stage_link(self.devices) if pipeline_degree > 1 else None

    def layer_costs(self, micro_batch: NDArray[np.int64]) -> LayerCosts:
        """Time of one micro-batch by what it is spent on; ``micro_batch`` broadcasts in front of (T, S)."""
        rest = self._rest_costs(micro_batch)
        if not self._arrays.own.any():
            return rest
        added = self._experts.layer_costs(micro_batch)
        return replace(
            rest,
            **{
                name: self._with_experts(getattr(rest, name), getattr(added, name))
                for name in ("ep_s", "sdp_s", "sync_s", "optimizer_s")
            },
        )

    def _with_experts(self, rest: NDArray[Number], added: NDArray[Number]) -> NDArray[Number]:
        """A table of all kinds and strategies, with what experts add where they have axes of their own."""
        shape = (*np.broadcast_shapes(rest.shape[:-2], added.shape[:-2]), *self._allowed.shape)
        total = np.broadcast_to(rest, shape).copy()
        total[..., self._experts.rows[:, None], np.nonzero(self._arrays.own)[0]] += added
        return total

    @cached_property
    def _rates(self) -> LayoutRates:
        whole = not self.cost.conventions.counts_rows
        return layout_rates(self.layouts, self.cost.cluster, always_factor_by_factor=whole)

    @cached_property
    def _forward_rates(self) -> LayoutRates:
        whole = not self.cost.conventions.counts_rows
        return layout_rates(self.layouts, self.cost.cluster, always_factor_by_factor=whole, back=False)

    @cached_property
    def _experts(self) -> ExpertCosts:
        own = [strategy for strategy in self.strategies if strategy.experts]
        return ExpertCosts(self.cost, ExpertPairs.of(own), self._pipeline_degree)

    def _rest_costs(self, micro_batch: NDArray[np.int64]) -> LayerCosts:
        """The same without what experts with axes of their own add.

        Communication hides behind computation. Where experts are apart, what the rest of the layer communicates is in
        flight while they compute, and the other way round: FSDP2 gathers one unit ahead.
        """
        layers, arrays, cluster = self._layers, self._arrays, self.cost.cluster
        conventions, precision = self.cost.conventions, self.cost.model.training.precision
        samples = micro_batch / arrays.data
        forward = computation.forward_s(samples, layers)
        backward = computation.backward_s(samples, layers, arrays)
        backward = backward + grades.graded_s(samples, layers, arrays, cluster.device)
        waiting = grades.offload_s(samples, layers, arrays, cluster.device, (forward, backward))

        message = samples * layers.tp_message_bytes
        gather_s = all_gather_s(message, arrays.tp)
        reduce_s = np.where(
            arrays.sequence_parallel, reduce_scatter_s(message, arrays.tp) + gather_s, all_reduce_s(message, arrays.tp)
        )
        forward_count = layers.tp_forward_collectives - arrays.own * layers.experts.tp_forward_collectives
        backward_count = layers.tp_backward_collectives - arrays.own * layers.experts.tp_backward_collectives
        backward_count = backward_count * layers.has_backward
        parameters = computation.local_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        trained = computation.trained_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        trains = (trained > 0) | (trained == parameters)  # a layer without parameters is charged as it always was
        tp_forward = forward_count * reduce_s
        # Recompute repeats forward, or with reductions kept its gathers of inputs; sequence parallelism gathers inputs
        # again for the weights' gradients.
        regather_s = arrays.recompute_but_attention * arrays.sequence_parallel * gather_s
        tp_again = (
            forward_count * layers.has_backward * (arrays.recompute * reduce_s + regather_s)
            + backward_count * arrays.sequence_parallel * trains * gather_s
        )
        tp_s = tp_forward + backward_count * reduce_s + tp_again

        parameter_gather = all_gather_s(parameters * precision.bytes, arrays.sdp)
        gradient_scatter = trains * reduce_scatter_s(trained * GRADIENT_BYTES, arrays.sdp)
        zero2_scatter = arrays.zero2 * trains * reduce_scatter_s(trained * GRADIENT_BYTES, arrays.dp)
        scatter_once = zero2_scatter if conventions.distributed_optimizer else 0.0
        each_backward = layers.has_backward * parameter_gather + gradient_scatter + zero2_scatter - scatter_once
        zero2_gather = arrays.zero2 * all_gather_s(parameters * precision.bytes, arrays.dp)
        beside_forward, beside_backward = forward, backward
        if arrays.own.any():
            inside = samples * layers.experts.forward_s
            inside_backward = samples * layers.experts.backward_s + arrays.recompute * inside
            beside_forward = np.where(arrays.own, inside, forward)
            beside_backward = np.where(arrays.own, inside_backward, backward)
        there, back = self._exchanges(samples)
        forward_alone = self._pass_s(beside_forward, 0.0, there)
        backward_alone = self._pass_s(beside_backward, 0.0, back)
        if conventions.gather_ahead:
            forward_with_gather = self._pass_s(beside_forward, parameter_gather, there)
            gather_exposed = self._pass_s(beside_forward, parameter_gather + zero2_gather, there) - forward_with_gather
        else:
            forward_with_gather, gather_exposed = forward_alone + parameter_gather, zero2_gather
        backward_with_scatter = self._pass_s(beside_backward, each_backward, back)

        shard = trained / arrays.sdp.size
        sync = np.where(arrays.zero2 | ~trains, scatter_once, all_reduce_s(shard * GRADIENT_BYTES, arrays.dp))
        sync_exposed = self._pass_s(beside_backward, each_backward + sync, back) - backward_with_scatter
        return LayerCosts(
            compute_s=forward + backward + waiting,
            tp_s=tp_s,
            ep_s=np.zeros((1, 1)),
            cp_s=(forward_alone - beside_forward) + (backward_alone - beside_backward),
            sdp_s=(forward_with_gather - forward_alone) + (backward_with_scatter - backward_alone),
            sync_s=gather_exposed + sync_exposed + self._tied_sync_s(),
            optimizer_s=computation.optimizer_s(trained, arrays, cluster.device, self.cost.optimizer),
        )

    def _exchanges(self, samples: Floats) -> tuple[Exchange | None, Exchange | None]:
        """What divided sequences add forward and backward; None: no strategy divides any."""
        layers, arrays = self._layers, self._arrays
        if (arrays.ring.size * arrays.ulysses.size).max() == 1:
            return None, None
        return exchanges(samples, layers, arrays, self.cost.cluster, self.cost.model.training.precision)

    def _pass_s(self, compute_s: Floats, messages_s: Floats | float, exchange: Exchange | None) -> Floats:
        """A pass through a layer, with messages that hide behind its computation. Those of the rest of a layer are in
        flight while its experts compute, beside which nothing is exchanged."""
        cluster, messages = self.cost.cluster, np.asarray(messages_s)
        hidden = overlapped_s(compute_s, messages, cluster.overlap_slowdown)
        if exchange is None:
            return hidden
        apart = exchange.seconds(compute_s, np.zeros(1), cluster) - compute_s + hidden
        return np.where(self._arrays.own, apart, exchange.seconds(compute_s, messages, cluster))

    def _tied_sync_s(self) -> Floats:
        """Copies of tied weights in two stages sum their gradients once an iteration."""
        layers, arrays, link = self._layers, self._arrays, self._stage_link
        tied = layers.tied_parameters - layers.frozen_tied_parameters
        if link is None or not tied.any():
            return np.zeros((1, 1))
        size = tied / arrays.tp.size / arrays.sdp.size * GRADIENT_BYTES
        seconds: Floats = np.where(tied > 0, all_reduce_s(size, GroupLinks.pair(link)), 0.0)
        return seconds

    def tables(self, micro_batch: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> Tables:
        """Integer tables for micro-batches of this many samples (all devices of the stage together)."""
        rest = self.rest_tables(micro_batch, micro_batches)
        if not self._arrays.own.any():
            return rest
        added = self._experts.tables(micro_batch, micro_batches)
        summed = {
            each.name: self._with_experts(getattr(rest, each.name), getattr(added, each.name))
            for each in fields(Tables)
        }
        return Tables(**summed | {"time_ns": np.minimum(summed["time_ns"], NEVER)})

    def rest_tables(self, micro_batch: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> Tables:
        """The same without what experts with axes of their own add."""
        held = self.memory_tables(micro_batch, micro_batches)
        sizes = Distinct(micro_batch)
        time = self._rest_costs(sizes.figures[:, None, None]).mean_ns(sizes, micro_batches[..., None, None])
        return replace(held, time_ns=np.where(held.time_ns < NEVER, np.maximum(time, 1), NEVER))

    def memory_tables(self, micro_batch: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> Tables:
        """The same with no more of times than what is possible: 0 or NEVER."""
        many = max(2, self.cost.conventions.pipeline_transients)
        sizes = Distinct(micro_batch * (many + 1) + np.minimum(micro_batches, many))
        states, saved, transient = map(sizes.each, self._bytes(*divmod(sizes.figures[:, None, None], many + 1)))
        micro_batch, micro_batches = micro_batch[..., None, None], micro_batches[..., None, None]
        fits = self._fits_host(micro_batch / self._arrays.data, micro_batches)
        return Tables(
            time_ns=np.where(self._possible(micro_batch) & fits, 0, NEVER),
            state_bytes=states,
            activation_bytes=saved,
            transient_bytes=transient,
        )

    def _bytes(self, micro_batch: Integers, micro_batches: Integers) -> tuple[Integers, Integers, Integers]:
        """Of states, activations and transients. Of how many micro-batches it counts whether there is one, and how many
        have their working sets at once."""
        layers, arrays = self._layers, self._arrays
        precision, conventions = self.cost.model.training.precision, self.cost.conventions
        samples = micro_batch / arrays.data
        parameters = computation.local_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        shared = computation.shared_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        trained = computation.trained_parameters(layers, arrays, tied_here=not self._tied_elsewhere)
        weights = memory.Weights(parameters, shared, trained)
        states = memory.state_bytes(weights, arrays, precision, self.cost.optimizer, conventions)
        states = states + memory.shared_bytes(shared, arrays, precision, conventions)
        saved = memory.activation_bytes(samples, layers, arrays)
        pipelined = self._stage_link is not None
        flying = samples * working_sets(micro_batches, conventions, pipelined=pipelined)
        transient = memory.transient_bytes(flying, weights, layers, arrays, precision, conventions)
        if pipelined:
            transient = np.maximum(transient, memory.forward_bytes(samples, layers, arrays))
        late = self.cost.late_gradients(micro_batches, pipelined=pipelined)
        if late.any():
            alone = (layers.first > 0) & (micro_batches == 1)
            less, then = memory.late_gradient_bytes(saved, weights, alone, layers, arrays, precision)
            states, transient = states - late * less, transient + late * then
        return rounded_up(states), rounded_up(saved), rounded_up(transient)

    def possible(self, micro_batch: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(…, T, S) whether a strategy can run a kind of layer in micro-batches of so many samples."""
        return self._possible(micro_batch[..., None, None])

    def _possible(self, micro_batch: NDArray[np.int64]) -> NDArray[np.bool_]:
        possible: NDArray[np.bool_] = self._allowed & (micro_batch % self.data_degree == 0)
        return possible

    def _fits_host(self, samples: Floats, micro_batches: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the host has room for what is offloaded, even if all layers of the model are in one stage, whatever
        the schedule, and twice: PyTorch rounds pinned memory up to powers of two."""
        room = self.cost.cluster.device.host_memory_bytes
        if room is None or not self._arrays.offload.any():
            return np.ones((1, 1), dtype=np.bool_)
        each = self._counts * grades.full_activation_bytes(self._layers, self._arrays)
        in_flight = micro_batches if self._pipeline_degree > 1 else 1
        fits: NDArray[np.bool_] = 2 * in_flight * samples * each.sum(axis=-2, keepdims=True) <= room
        return fits | ~self._arrays.offload

    @cached_property
    def _counts(self) -> Integers:
        """(T, 1) layers of each kind."""
        names = Counter(layer.name for layer in self.cost.model.layers)
        return np.array([names[kind.name] for kind in self.kinds])[:, None]

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
        group = GroupLinks.of([factors], self.cost.cluster)
        working = memory.working_bytes(layers, arrays, self.cost.conventions)
        saved, transient = resplit_bytes(layers, arrays, group, precision, micro_batch / arrays.data * working)
        pays = (self.split_of != owner) & (layers.tied_parameters > 0)
        return Resplit(
            time_ns=np.where(pays, rounded_up(resplit_s(layers, arrays, group, precision) * 1e9), 0),
            activation_bytes=np.where(pays, rounded_up(saved), 0),
            transient_bytes=np.where(pays, rounded_up(transient), 0),
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

    def change_ns(self, micro_batch: int) -> Integers:
        """Slice-Gather after a layer of each kind, from layout to layout: (T, K, K)."""
        size = micro_batch * self._layers.boundary_bytes[:, :, None]
        seconds = self._rates.change_s(micro_batch, size)
        back = self._layers.has_backward[:, :, None]
        if not back.all():
            seconds = np.where(back > 0, seconds, self._forward_rates.change_s(micro_batch, size))
        return rounded_up(seconds * 1e9)

    def gradient_transfer_ns(self, micro_batch: int | Integers) -> Integers:
        """The same for gradients, which come back where anything up to there trains."""
        return self.transfer_ns(micro_batch) * (self._layers.has_backward > 0)

    def transfer_ns(self, micro_batch: int | Integers) -> Integers:
        """One direction of the transfer between stages after a layer of each kind, by the receiver's layout: (T, K).

        Of sizes (N, 1, 1) it is (N, T, K). A rank receives just the rows and the part of the sequence that its layout
        asks for, whatever the sender's is.
        """
        if self._stage_link is None:
            return np.zeros((len(self._layers.boundary_bytes), len(self.layouts)), dtype=np.int64)
        parts = np.array([layout.parts for layout in self.layouts])
        link = self._stage_link
        size = micro_batch / parts * self._layers.boundary_bytes
        return rounded_up(transfer_s(size, link.bytes_per_s, link.latency_s) * 1e9)


def _allowed(cost: CostModel, kinds: Sequence[LayerSpec], strategies: Sequence[Strategy]) -> NDArray[np.bool_]:
    """(T, S) whether each strategy can run a kind of layer, as far as that does not depend on axes of its experts."""

    def supports(kind: LayerSpec, strategy: Strategy) -> bool:
        if strategy.offload and not cost.cluster.device.offloads:
            return False
        if not strategy.experts:
            return kind.supports(strategy)
        apart = kind.experts is not None and kind.supports(replace(strategy, experts=()))
        return apart and kind.allows_grade(strategy)

    possible = allowed(cost.model, kinds, strategies, supports)
    for row, kind in enumerate(kinds):
        pin = dict(cost.pins).get(kind.name)
        if pin is not None:
            possible[row] &= [strategy == pin for strategy in strategies]
    return possible
