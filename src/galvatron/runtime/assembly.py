"""Puts one rank's stage together: layers cut, split, filled with weights and made into units, in the plan's order.

Works layer by layer, so that a rank never holds more than one whole layer beside its own shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from galvatron.core.spec import Factor, Kind, Strategy, degree_of
from galvatron.families.layer import Layer, LayeredModel, Tie, Use
from galvatron.families.rules import Table
from galvatron.families.weights import Weights
from galvatron.runtime.data_parallel.replicated import ReplicatedUnit
from galvatron.runtime.data_parallel.sharded import ShardedUnit, ShardGroups, local_part, prefetch, shard, shard_root
from galvatron.runtime.data_parallel.shards import ParameterShard, TensorSplit, part_of
from galvatron.runtime.data_parallel.units import LocalParameter, Unit
from galvatron.runtime.layout.groups import (
    GroupPool,
    Position,
    StagePlan,
    coordinate,
    layer_groups,
    ranks_along,
    tie_group,
)
from galvatron.runtime.layout.slice_gather import LayoutChange, RowAssignments
from galvatron.runtime.pipeline.stage import Stage, StageLayer
from galvatron.runtime.randomness import LayerRandomness, draws
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.tensor_parallel.split import SplitParameters, TensorGroup, split
from galvatron.runtime.tied.in_stage import SplitRowsOf, attach_tied, resplit

__all__ = ["Assembly", "RankStage", "assemble"]


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
    assignments: RowAssignments
    rank: int


def assemble(
    layered: LayeredModel, rank_stage: RankStage, pool: GroupPool, weights: Weights, settings: ComputeSettings
) -> Assembly:
    """Build the stage of a rank."""
    return _Assembler(layered, rank_stage, pool, settings).assemble(weights)


@dataclass(kw_only=True)
class _Part:
    """A layer on its way into the stage."""

    index: int
    layer: Layer
    strategy: Strategy
    splits: dict[str, TensorSplit]
    partial: frozenset[str]
    tensor: TensorGroup | None
    stage_layer: StageLayer
    values: dict[str, Tensor]
    """Whole values of its parameters."""


class _Assembler:
    def __init__(
        self, layered: LayeredModel, rank_stage: RankStage, pool: GroupPool, settings: ComputeSettings
    ) -> None:
        self.layered, self.pool, self.settings = layered, pool, settings
        self.plan, self.stages, self.assignments = rank_stage.plan, rank_stage.stages, rank_stage.assignments
        self.position = Position(self.plan.ranks, rank_stage.rank)
        self.units: list[Unit] = []
        self.owners: dict[int, LocalParameter] = {}
        self._tied: dict[int, Callable[[_Part], Callable[[], Tensor]]] = {}
        self._prepare: dict[int, Callable[[], None]] = {}

    def assemble(self, weights: Weights) -> Assembly:
        stage_layers, changes, rows = [], [], self.assignments.rows
        before: Strategy | None = None
        for index, strategy in zip(self.plan.layers, self.plan.strategies, strict=True):
            changes.append(
                None if before is None else LayoutChange(self.pool, self.position, rows, before.layout, strategy.layout)
            )
            stage_layers.append(self._stage_layer(index, strategy, weights.tensors(index)))
            before = strategy
        stage = Stage(stage_layers, self.assignments.numbers, changes)
        stage.train()
        sharded = [unit for unit in self.units if isinstance(unit, ShardedUnit)]
        if sharded:
            shard_root(stage, sharded, self.settings.device.type)
            prefetch(sharded)
        return Assembly(stage=stage, units=self.units, owners=self.owners)

    def _stage_layer(self, index: int, strategy: Strategy, values: dict[str, Tensor]) -> StageLayer:
        layer = self.layered.layers[index].detached()
        shared = frozenset(use.name for _, tie, use in self._ties(index) if tie.small)
        randomness = self._randomness(index, layer, strategy)
        tensor = self._tensor_group(strategy, randomness)
        stage_layer = StageLayer(layer, randomness, recompute=strategy.recompute)
        done = split(layer, tensor, shared) if tensor is not None and layer.rules else SplitParameters(splits={})
        part = _Part(
            index=index, layer=layer, strategy=strategy, splits=done.splits, partial=done.partial, tensor=tensor,
            stage_layer=stage_layer, values=values,
        )  # fmt: skip
        self._attach_tied(part)
        self._fill(part)
        self._make_unit(part)
        return stage_layer

    # Who computes what

    def _tensor_group(self, strategy: Strategy, randomness: LayerRandomness | None) -> TensorGroup | None:
        group = self.pool.group(layer_groups(self.position, strategy).tensor)
        if group is None:
            return None
        return TensorGroup(
            group=group,
            sequence=strategy.sequence_parallel,
            on_enter=randomness.inside if randomness is not None else None,
            on_leave=randomness.outside if randomness is not None else None,
        )

    def _randomness(self, index: int, layer: Layer, strategy: Strategy) -> LayerRandomness | None:
        if not draws(layer.drawing_modules()):
            return None
        return LayerRandomness(
            device=self.settings.device,
            seed=self.settings.seed,
            layer=index,
            rows=coordinate(self.position.index, strategy.batch_factors),
            tensor=coordinate(self.position.index, strategy.factors(Kind.TP)),
            sequence=strategy.sequence_parallel,
        )

    # Tied weights

    def _ties(self, index: int) -> list[tuple[int, Tie, Use]]:
        return [
            (number, tie, use) for number, tie in enumerate(self.layered.ties) for use in tie.uses if use.layer == index
        ]

    def _stages_of(self, tie: Tie) -> list[StagePlan]:
        return [stage for stage in self.stages if stage.uses(tie)]

    def _used_later(self, index: int) -> bool:
        """Whether a later layer of the stage will use a weight of this one."""
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
        value = part.values[use.name].to(self.settings.device, self.settings.master_dtype)
        master = nn.Parameter(value.clone())
        local = LocalParameter(
            name=self._stock_name(tie),
            shard=ParameterShard(tuple(value.shape)),
            master=master,
            replicas=len(self.plan.ranks),
            holders=self.plan.ranks,
            primary=self.position.index == 0 and stages[0] is self.plan,
            counted=stages[0] is self.plan,
        )
        work = self._working(master)
        group = self.pool.group(tie_group(stages))
        self.units.append(ReplicatedUnit([(local, work)], group, masters=work is not master))
        self.owners[number] = local
        self._tied[number] = lambda part: lambda: work

    def _stock_name(self, tie: Tie) -> str:
        first = tie.uses[0]
        return self.layered.layers[first.layer].stock_name(first.name)

    # Parameters

    def _fill(self, part: _Part) -> None:
        """Give every parameter this rank's part of its value, and move buffers to the device."""
        for name, parameter in list(part.layer.named_parameters()):
            shard = ParameterShard(tuple(part.values[name].shape), part.splits.get(name))
            value = shard.take(part.values[name]).to(self.settings.device, self.settings.master_dtype, copy=True)
            _set_everywhere(part.layer, parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        part.layer.to(self.settings.device)

    def _make_unit(self, part: _Part) -> None:
        strategy = part.strategy
        if strategy.sharding_factors and any(True for _ in part.layer.parameters()):
            locals_ = self._shard(part, strategy.sharding_factors)
        else:
            locals_ = self._replicate(part)
        part.stage_layer.after_backward = partial(_passed, weakref.ref(self.units[-1]))
        for number, tie, use in self._ties(part.index):
            if not tie.small and number not in self._tied:
                self._own(number, tie, use, part, locals_[use.name])

    def _replicate(self, part: _Part) -> dict[str, LocalParameter]:
        pairs: dict[str, tuple[LocalParameter, nn.Parameter]] = {}
        for name, parameter in list(part.layer.named_parameters()):
            work = self._working(parameter)
            if work is not parameter:
                _set_everywhere(part.layer, parameter, work)
            pairs[name] = (self._local(part, name, parameter, frozenset(), None), work)
        group = self.pool.group(layer_groups(self.position, part.strategy).data)
        narrow = self.settings.dtype != self.settings.master_dtype
        self.units.append(ReplicatedUnit(list(pairs.values()), group, masters=narrow))
        return {name: local for name, (local, _) in pairs.items()}

    def _working(self, master: nn.Parameter) -> nn.Parameter:
        if self.settings.dtype == self.settings.master_dtype:
            return master
        return nn.Parameter(master.detach().to(self.settings.dtype), requires_grad=master.requires_grad)

    def _shard(self, part: _Part, factors: frozenset[Factor]) -> dict[str, LocalParameter]:
        strategy, used_later = part.strategy, self._used_later(part.index)
        groups = self._shard_groups(strategy)
        heights = {name: parameter.shape[0] for name, parameter in part.layer.named_parameters()}
        shard(
            part.stage_layer,
            groups,
            self.settings.device.type,
            self.settings.dtype,
            reshard=not (strategy.zero2 or used_later),
        )
        place, degree = coordinate(self.position.index, factors), degree_of(factors)
        pairs: dict[str, tuple[LocalParameter, nn.Parameter]] = {}
        for name, parameter in part.layer.named_parameters():
            rows = part_of(heights[name], place, degree)
            master = nn.Parameter(local_part(parameter.detach()), requires_grad=parameter.requires_grad)
            pairs[name] = (self._local(part, name, master, factors, rows), parameter)
        self.units.append(ShardedUnit(part.stage_layer, groups, list(pairs.values()), zero2=strategy.zero2))
        return {name: local for name, (local, _) in pairs.items()}

    def _shard_groups(self, strategy: Strategy) -> ShardGroups:
        groups = layer_groups(self.position, strategy)
        group, replicate = self.pool.group(groups.shard), self.pool.group(groups.data)
        assert group is not None
        if replicate is None or strategy.zero2:
            return ShardGroups(shard=group)
        ranks = self.plan.ranks
        replicas = [layer_groups(Position(ranks, peer), strategy).shard.ranks for peer in groups.data.ranks]
        return ShardGroups(shard=group, replicate=replicate, ranks=tuple(replicas))

    def _local(
        self, part: _Part, name: str, master: nn.Parameter, factors: frozenset[Factor], rows: range | None
    ) -> LocalParameter:
        layered = part.splits.get(name)
        divided = factors | (part.strategy.factors(Kind.TP) if layered is not None else frozenset())
        parts = degree_of(divided)
        others = part.strategy.factors(*Kind) - divided
        sequence = part.strategy.sequence_parallel and layered is None and part.layer.rules
        partial = part.tensor is not None and (sequence or name in part.partial)
        return LocalParameter(
            name=part.layer.stock_name(name),
            shard=ParameterShard(tuple(part.values[name].shape), layered, rows),
            master=master,
            replicas=len(self.plan.ranks) // parts,
            holders=ranks_along(self.position, others),
            primary=coordinate(self.position.index, others) == 0,
            summed_over=part.tensor.group if partial and part.tensor is not None else None,
        )

    def _own(self, number: int, tie: Tie, use: Use, part: _Part, local: LocalParameter) -> None:
        """The first user in a stage owns the stage's copy of a tied weight, and the others use it."""
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
        unit = self.units[-1]
        if isinstance(unit, ShardedUnit):
            self._prepare[number] = unit.gather

    def _split_rows(self, part: _Part, name: str) -> SplitRowsOf:
        if part.tensor is None:
            return SplitRowsOf(None, (), split=False)
        ranks = layer_groups(self.position, part.strategy).tensor.ranks
        return SplitRowsOf(part.tensor.group, ranks, split=name in part.splits)


def _passed(unit: weakref.ref[Unit]) -> None:
    owner = unit()
    if owner is not None:
        owner.passed()


def _set_everywhere(layer: Layer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter under each of its names."""
    for module in layer.modules():
        for name in [key for key, value in module._parameters.items() if value is old]:
            setattr(module, name, new)
