"""Puts one rank's stage together: layers cut, split, filled with weights and made into units, in the plan's order.

Works layer by layer, so that a rank never holds more than one whole layer beside its own shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from galvatron.core.spec import Kind, Strategy
from galvatron.families.generic.adapter import Generic
from galvatron.families.layer import Layer, LayeredModel, Tie, Use
from galvatron.families.lora import scale_at_rank
from galvatron.families.rules import Table
from galvatron.families.weights import Weights
from galvatron.runtime import collectives
from galvatron.runtime.buffer_types import to_type
from galvatron.runtime.compiled import compiler
from galvatron.runtime.context.attention import attend_in_context
from galvatron.runtime.data_parallel.making import FilledLayer, LayerUnits, UnitMaker, set_everywhere
from galvatron.runtime.data_parallel.replicated import ReplicatedUnit
from galvatron.runtime.data_parallel.sharded import ShardedUnit, prefetch, shard_root
from galvatron.runtime.data_parallel.shards import ParameterShard, TensorSplit, part_of
from galvatron.runtime.data_parallel.units import LocalParameter, Unit
from galvatron.runtime.drawing import draws, draws_on_host
from galvatron.runtime.experts.dispatch import ExpertGroups, divide, in_experts
from galvatron.runtime.float8 import to_float8
from galvatron.runtime.fused_loss import fuse
from galvatron.runtime.layout.groups import (
    GroupPool,
    Position,
    StagePlan,
    coordinate,
    layer_groups,
    rows_group,
    tie_group,
)
from galvatron.runtime.layout.portions import Portions
from galvatron.runtime.layout.slice_gather import LayoutChange
from galvatron.runtime.offload import HostMemory
from galvatron.runtime.pipeline.stage import Saving, Stage, StageLayer
from galvatron.runtime.randomness import LayerRandomness
from galvatron.runtime.selective import Selective, grade_of
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.tensor_parallel.split import TensorGroup, split
from galvatron.runtime.tied.in_stage import SplitRowsOf, attach_tied, resplit

__all__ = ["Assembly", "RankStage", "assemble", "sums_rows"]


@dataclass(kw_only=True)
class Assembly:
    """A rank's stage, ready to run."""

    stage: Stage
    units: list[Unit]
    owners: dict[int, LocalParameter] = field(default_factory=dict)
    """For each tie (by its number in the model) that this stage uses: the copy that its first user owns."""


@dataclass(frozen=True, kw_only=True)
class RankStage:
    """The stage that a rank runs, and its place in it."""

    plan: StagePlan
    stages: Sequence[StagePlan]
    """All of the pipeline."""
    portions: Portions
    rank: int
    turns: bool = False
    """Whether the backward of each micro-batch follows its forward at once, as it does in the last stage with 1F1B."""


def assemble(
    layered: LayeredModel, rank_stage: RankStage, pool: GroupPool, weights: Weights, settings: ComputeSettings
) -> Assembly:
    """Build the stage of a rank."""
    return _Assembler(layered, rank_stage, pool, settings).assemble(weights)


def sums_rows(layered: LayeredModel) -> bool:
    """Whether the last layer needs a sum over all rows of a micro-batch."""
    return layered.wide_activations > 0


@dataclass(kw_only=True)
class _Part(FilledLayer):
    """A layer on its way into the stage."""

    values: dict[str, Tensor]
    """Whole values of its parameters."""


class _Assembler:
    def __init__(
        self, layered: LayeredModel, rank_stage: RankStage, pool: GroupPool, settings: ComputeSettings
    ) -> None:
        self.layered, self.pool, self.settings = layered, pool, settings
        self.plan, self.stages, self.portions = rank_stage.plan, rank_stage.stages, rank_stage.portions
        self.position = Position(self.plan.ranks, rank_stage.rank)
        self.maker = UnitMaker(pool, self.position, settings)
        self._first_trained, self._turns = layered.first_trained, rank_stage.turns
        self.units: list[Unit] = []
        self.layer_units: list[LayerUnits] = []
        self.owners: dict[int, LocalParameter] = {}
        self._tied: dict[int, Callable[[_Part], Callable[[], Tensor]]] = {}
        self._prepare: dict[int, Callable[[], None]] = {}

    def assemble(self, weights: Weights) -> Assembly:
        stage_layers, changes, rows = [], [], self.portions.rows
        if self.settings.buffers_follow:
            to_type(self.layered.calling_modules(), self.settings.dtype)
        before: Strategy | None = None
        for index, strategy in zip(self.plan.layers, self.plan.strategies, strict=True):
            changes.append(
                None if before is None else LayoutChange(self.pool, self.position, rows, before.layout, strategy.layout)
            )
            stage_layers.append(self._stage_layer(index, strategy, weights.tensors(index)))
            before = strategy
        stage = Stage(stage_layers, self.portions.numbers, changes)
        stage.train()
        sharded = [[unit for unit in own.units if isinstance(unit, ShardedUnit)] for own in self.layer_units]
        if any(sharded):
            shard_root(stage, [unit for own in sharded for unit in own], self.settings.device.type)
            prefetch([own for own in sharded if own])
        return Assembly(stage=stage, units=self.units, owners=self.owners)

    def _stage_layer(self, index: int, strategy: Strategy, values: dict[str, Tensor]) -> StageLayer:
        layer = self.layered.layers[index].detached()
        if strategy.context_factors:
            attend_in_context(layer)
        scale_at_rank(layer)
        if index == len(self.layered.layers) - 1:
            self._sum_rows(layer, strategy)
        shared = frozenset(use.name for _, tie, use in self._ties(index) if tie.small)
        randomness = self._randomness(index, layer, strategy)
        tensor = self._tensor_group(strategy, randomness)
        stage_layer = StageLayer(layer, randomness, self._saving(strategy))
        splits, partial = self._split(layer, strategy, tensor, shared)
        if strategy.fused_loss:
            fuse(layer, tensor, compiled=self.settings.compile)
        if strategy.float8:
            to_float8(layer, self.settings.device)
        part = _Part(
            index=index, layer=layer, strategy=strategy, stage_layer=stage_layer, tensor=tensor, splits=splits,
            partial=partial, used_soon=self._used_soon(index), values=values,
            shapes={name: tuple(value.shape) for name, value in values.items()},
        )  # fmt: skip
        self._attach_tied(part)
        self._fill(part)
        self._make_units(part)
        # What breaks a graph would be kept whole between its parts.
        broken = layer.experts is not None or (randomness.needed is True and tensor is not None)
        compiles = self.settings.compile and not sums_rows(self.layered)
        if compiles and not (broken and grade_of(strategy)) and compiler().compile(layer, grade_of(strategy)):
            stage_layer.saving.selective = None
        return stage_layer

    def _saving(self, strategy: Strategy) -> Saving:
        grade = grade_of(strategy)
        return Saving(
            recompute=strategy.recompute,
            selective=None if grade is None else Selective(grade),
            host=self._host if strategy.offload else None,
        )

    @cached_property
    def _host(self) -> HostMemory:
        return HostMemory(self.settings.device)

    def _sum_rows(self, last: Layer, strategy: Strategy) -> None:
        group = self.pool.group(rows_group(self.position, strategy)) if sums_rows(self.layered) else None
        if group is not None:
            last.over_rows = partial(collectives.all_reduce, group=group)

    # Who computes what

    def _tensor_group(self, strategy: Strategy, randomness: LayerRandomness) -> TensorGroup | None:
        group = self.pool.group(layer_groups(self.position, strategy).tensor)
        if group is None:
            return None
        return TensorGroup(
            group=group,
            sequence=strategy.sequence_parallel,
            on_enter=randomness.inside if randomness.needed else None,
            on_leave=randomness.outside if randomness.needed else None,
        )

    def _split(
        self, layer: Layer, strategy: Strategy, tensor: TensorGroup | None, shared: frozenset[str]
    ) -> tuple[dict[str, tuple[TensorSplit, ...]], frozenset[str]]:
        """How each parameter is split, and of which whole ones TP ranks have partial gradients."""
        splits: dict[str, tuple[TensorSplit, ...]] = {}
        partial: frozenset[str] = frozenset()
        apart = layer.experts if strategy.experts else None
        rules = [rule for rule in layer.rules if apart is None or not in_experts(rule, apart)]
        if tensor is not None and rules:
            done = split(layer, rules, tensor, shared)
            splits, partial = {name: (own,) for name, own in done.splits.items()}, done.partial
        if apart is not None:
            splits |= divide(layer, apart, self._expert_groups(strategy))
        return splits, partial

    def _expert_groups(self, strategy: Strategy) -> ExpertGroups:
        groups = layer_groups(self.position, strategy)
        dispatch = self.pool.group(groups.dispatch)
        assert dispatch is not None
        return ExpertGroups(
            dispatch=dispatch,
            tensor=self.pool.group(groups.expert_tensor),
            # With sequence parallelism they hold different tokens already.
            slices=None if strategy.sequence_parallel else self.pool.group(groups.token_slices),
        )

    def _randomness(self, index: int, layer: Layer, strategy: Strategy) -> LayerRandomness:
        return LayerRandomness(
            device=self.settings.device,
            seed=self.settings.seed,
            layer=index,
            rows=coordinate(self.position.index, strategy.gradient_factors),
            tensor=coordinate(self.position.index, strategy.factors(Kind.TP)),
            sequence=strategy.sequence_parallel,
            needed=draws(layer.drawing_modules()) or None,
            on_host=draws_on_host(layer.drawing_modules()) or None,
        )

    # Tied weights

    def _ties(self, index: int) -> list[tuple[int, Tie, Use]]:
        return [
            (number, tie, use) for number, tie in enumerate(self.layered.ties) for use in tie.uses if use.layer == index
        ]

    def _stages_of(self, tie: Tie) -> list[StagePlan]:
        return [stage for stage in self.stages if stage.uses(tie)]

    def _used_soon(self, index: int) -> bool:
        """Whether a later layer of the stage will use a weight of this one, or backward begins with it at once."""
        if self._turns and index == self.plan.layers[-1]:
            return True
        return any(
            use.layer in self.plan.layers and use.layer > index
            for number, tie, _ in self._ties(index)
            if not tie.small and number not in self._tied
            for use in tie.uses
        )

    def _attach_tied(self, part: _Part) -> None:
        """Give the layer the tied weights that other layers of this stage own."""
        for number, tie, use in self._ties(part.index):
            if tie.small:
                self._attach_table(number, tie, use, part)
            elif number in self._tied:
                attach_tied(part.layer, use.name, self._tied[number](part), self._like, self._prepare.get(number))

    def _attach_table(self, number: int, tie: Tie, use: Use, part: _Part) -> None:
        """A small table is whole on each rank; a layer sees the columns of its own heads."""
        if number not in self._tied:
            self._make_table(number, tie, use, part)
        rule = next((rule for rule in part.layer.rules if isinstance(rule, Table) and rule.path == use.name), None)
        owner = self._tied[number](part)
        if part.tensor is not None and rule is not None:
            whole = self.owners[number].shard.shape[rule.dim]
            mine = part_of(whole, part.tensor.index, part.tensor.degree)
            dim = rule.dim
            attach_tied(part.layer, use.name, lambda: owner().narrow(dim, mine.start, len(mine)), self._like)
        else:
            attach_tied(part.layer, use.name, owner, self._like)

    @property
    def _like(self) -> Tensor:
        """Of the dtype and on the device of what layers compute with."""
        return torch.empty(0, dtype=self.settings.dtype, device=self.settings.device)

    def _make_table(self, number: int, tie: Tie, use: Use, part: _Part) -> None:
        stages = self._stages_of(tie)
        trained = part.layer.get_parameter(use.name).requires_grad
        value = part.values[use.name].to(self.settings.device, self.settings.held_dtype(trained=trained))
        master = nn.Parameter(value.clone(), requires_grad=trained)
        local = LocalParameter(
            name=self._stock_name(tie),
            shard=ParameterShard(tuple(value.shape)),
            master=master,
            replicas=len(self.plan.ranks),
            holders=self.plan.ranks,
            primary=self.position.index == 0 and stages[0] is self.plan,
            counted=stages[0] is self.plan,
        )
        work = self.maker.working(master)
        group = self.pool.group(tie_group(stages))
        self.units.append(ReplicatedUnit([(local, work)], group, in_the_end=len(stages) > 1))
        self.owners[number] = local
        self._tied[number] = lambda part: lambda: work

    def _stock_name(self, tie: Tie) -> str:
        first = tie.uses[0]
        return self.layered.layers[first.layer].stock_name(first.name)

    # Parameters

    def _fill(self, part: _Part) -> None:
        """Give every parameter this rank's part of its value, and move buffers to the device."""
        for name, parameter in list(part.layer.named_parameters()):
            value = part.shard(name).take(part.values[name])
            held = self.settings.held_dtype(trained=parameter.requires_grad)
            value = value.to(self.settings.device, held, copy=True)
            set_everywhere(part.layer, parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        if self.settings.buffers_follow:
            to_type(part.layer.drawing_modules(), self.settings.dtype)
        part.layer.to(self.settings.device)

    def _make_units(self, part: _Part) -> None:
        made = self.maker.make(part)
        for unit in made.units:
            if isinstance(unit, ShardedUnit):
                unit.has_backward = part.index >= self._first_trained
        self.units += made.units
        self.layer_units.append(made)
        assert isinstance(part.stage_layer, StageLayer)
        # Of a model that nobody knows, the first layer that trains may have experts without a token on this rank.
        part.stage_layer.always_passed = (
            isinstance(self.layered, Generic)
            and part.index == self._first_trained
            and any(isinstance(unit, ShardedUnit) for unit in made.units)
        )
        part.stage_layer.after_backward = partial(_passed, [weakref.ref(unit) for unit in made.units])
        for number, tie, use in self._ties(part.index):
            if not tie.small and number not in self._tied:
                self._own(number, tie, use, part, made)

    def _own(self, number: int, tie: Tie, use: Use, part: _Part, made: LayerUnits) -> None:
        """The first user in a stage owns the stage's copy of a tied weight, and the others use it."""
        local = made.locals[use.name]
        local.name = self._stock_name(tie)
        local.counted = self._stages_of(tie)[0] is self.plan
        local.primary = local.primary and local.counted
        self.owners[number] = local
        path, _, name = use.name.rpartition(".")
        owner = part.layer.get_submodule(path)
        height = local.shard.shape[0]
        source = self._split_rows(part, use.name)

        def tied_to(user: _Part) -> Callable[[], Tensor]:
            target = self._split_rows(user, next(use.name for n, _, use in self._ties(user.index) if n == number))
            return lambda: resplit(getattr(owner, name), height, source, target)

        self._tied[number] = tied_to
        if isinstance(made.rest, ShardedUnit):
            self._prepare[number] = made.rest.gather

    def _split_rows(self, part: _Part, name: str) -> SplitRowsOf:
        if part.tensor is None:
            return SplitRowsOf(None, (), split=False)
        ranks = layer_groups(self.position, part.strategy).tensor.ranks
        return SplitRowsOf(part.tensor.group, ranks, split=name in part.splits)


def _passed(units: Sequence[weakref.ref[Unit]]) -> None:
    for unit in units:
        owner = unit()
        if owner is not None:
            owner.passed()
