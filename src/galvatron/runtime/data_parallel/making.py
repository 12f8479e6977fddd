"""From a layer that is split and filled to its units: who holds the same part of each parameter, and who shards it.

The experts of a layer may have axes of their own. They are then a unit of their own, with other groups than the rest of
the layer: their gradients are summed over the ranks that hold the same experts, and over no others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from galvatron.core.spec import Factors, Kind, Strategy, degree_of
from galvatron.families.layer import Layer
from galvatron.runtime.data_parallel.replicated import ReplicatedUnit
from galvatron.runtime.data_parallel.sharded import ShardedUnit, ShardGroups, local_part, shard
from galvatron.runtime.data_parallel.shards import ParameterShard, TensorSplit, part_of
from galvatron.runtime.data_parallel.units import LocalParameter, Unit
from galvatron.runtime.layout.groups import GroupPool, LayerGroups, Position, coordinate, layer_groups, ranks_along
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.tensor_parallel.split import TensorGroup

__all__ = ["FilledLayer", "LayerUnits", "UnitMaker", "set_everywhere"]


@dataclass(kw_only=True)
class FilledLayer:
    """A layer with this rank's part of each parameter."""

    index: int
    layer: Layer
    strategy: Strategy
    stage_layer: nn.Module
    """What runs it; what is sharded is gathered before."""
    tensor: TensorGroup | None
    shapes: dict[str, tuple[int, ...]]
    """Of its whole parameters."""
    splits: dict[str, tuple[TensorSplit, ...]]
    """By TP and EP; other parameters are whole."""
    partial: frozenset[str]
    """Of the whole ones, those of whose gradient each TP rank has a part."""
    used_soon: bool
    """Whether its parameters are used again at once after its forward: one by a later layer of the stage, or all of
    them by its own backward."""

    def shard(self, name: str, rows: range | None = None) -> ParameterShard:
        """This rank's part of a parameter."""
        return ParameterShard(self.shapes[name], self.splits.get(name, ()), rows)

    @property
    def own_experts(self) -> frozenset[str]:
        """Its parameters that have axes of their own."""
        experts = self.layer.experts
        if experts is None or not self.strategy.experts:
            return frozenset()
        return frozenset(f"{experts.path}.{name}" for name in experts.parameters)


@dataclass(frozen=True, kw_only=True)
class LayerUnits:
    """The units of a layer, in the order in which its forward needs them."""

    units: tuple[Unit, ...]
    locals: dict[str, LocalParameter] = field(default_factory=dict)
    """By their names in the layer."""

    @property
    def rest(self) -> Unit:
        """That of all but the experts."""
        return self.units[0]


@dataclass(frozen=True, kw_only=True)
class _Spread:
    """Some parameters of a layer, and over which factors of the rank they are spread."""

    names: tuple[str, ...]
    module: nn.Module
    """What is sharded as one."""
    all: Factors
    sharded: Factors
    tensor: Factors
    experts: Factors
    data_group: str
    """The field of :class:`LayerGroups` with the ranks that hold the same."""
    shard_group: str

    def divided(self, shard: ParameterShard) -> Factors:
        """Those that divide a parameter."""
        features = [split for split in shard.splits if not (self.experts and split.dim == 0)]
        return self.sharded | self.experts | (self.tensor if features else frozenset())


class UnitMaker:
    """Makes the units of one rank's layers."""

    def __init__(self, pool: GroupPool, position: Position, settings: ComputeSettings) -> None:
        self._pool, self._position, self._settings = pool, position, settings

    def make(self, part: FilledLayer) -> LayerUnits:
        """A layer's units; the experts' is made first, because FSDP2 leaves to a module what its own parts lack."""
        made = [self._unit(part, spread) for spread in reversed(self._spreads(part))]
        made.reverse()
        return LayerUnits(
            units=tuple(unit for unit, _ in made),
            locals={name: own for _, locals_ in made for name, own in locals_.items()},
        )

    def working(self, master: nn.Parameter) -> nn.Parameter:
        """What a module computes with: the master, or a copy of it in a narrower type. A frozen one is of that type
        already."""
        if self._settings.dtype == master.dtype:
            return master
        return nn.Parameter(master.detach().to(self._settings.dtype), requires_grad=master.requires_grad)

    def _spreads(self, part: FilledLayer) -> list[_Spread]:
        strategy, apart = part.strategy, part.own_experts
        names = [name for name, _ in part.layer.named_parameters()]
        found = [
            _Spread(
                names=tuple(name for name in names if name not in apart),
                module=part.stage_layer,
                all=strategy.factors(*Kind),
                sharded=strategy.sharding_factors,
                tensor=strategy.factors(Kind.TP),
                experts=frozenset(),
                data_group="data",
                shard_group="shard",
            )
        ]
        if apart:
            assert part.layer.experts is not None
            found.append(
                _Spread(
                    names=tuple(name for name in names if name in apart),
                    module=part.layer.get_submodule(part.layer.experts.path),
                    all=strategy.expert_factors(*Kind),
                    sharded=strategy.expert_factors(Kind.SDP),
                    tensor=strategy.expert_factors(Kind.TP),
                    experts=strategy.expert_factors(Kind.EP),
                    data_group="expert_data",
                    shard_group="expert_shard",
                )
            )
        return found

    def _unit(self, part: FilledLayer, spread: _Spread) -> tuple[Unit, dict[str, LocalParameter]]:
        return self._shard(part, spread) if spread.sharded and spread.names else self._replicate(part, spread)

    def _replicate(self, part: FilledLayer, spread: _Spread) -> tuple[Unit, dict[str, LocalParameter]]:
        pairs: dict[str, tuple[LocalParameter, nn.Parameter]] = {}
        for name in spread.names:
            parameter = part.layer.get_parameter(name)
            work = self.working(parameter)
            if work is not parameter:
                set_everywhere(part.layer, parameter, work)
            pairs[name] = (self._local(part, spread, name, parameter, None), work)
        group = self._pool.group(getattr(layer_groups(self._position, part.strategy), spread.data_group))
        unit = ReplicatedUnit(list(pairs.values()), group)
        return unit, {name: local for name, (local, _) in pairs.items()}

    def _shard(self, part: FilledLayer, spread: _Spread) -> tuple[Unit, dict[str, LocalParameter]]:
        zero2 = part.strategy.zero2 and not spread.experts
        groups = self._shard_groups(part.strategy, spread, zero2=zero2)
        heights = {name: part.layer.get_parameter(name).shape[0] for name in spread.names}
        own = {part.layer.get_parameter(name) for name in spread.names}
        shard(
            spread.module,
            groups,
            self._settings,
            reshard=not (zero2 or part.used_soon),
            others={parameter for parameter in spread.module.parameters() if parameter not in own},
        )
        place, degree = coordinate(self._position.index, spread.sharded), degree_of(spread.sharded)
        pairs: dict[str, tuple[LocalParameter, nn.Parameter]] = {}
        for name in spread.names:
            parameter = part.layer.get_parameter(name)
            rows = part_of(heights[name], place, degree)
            master = nn.Parameter(local_part(parameter.detach()), requires_grad=parameter.requires_grad)
            pairs[name] = (self._local(part, spread, name, master, rows), parameter)
        unit = ShardedUnit(spread.module, groups, list(pairs.values()), zero2=zero2, inside=bool(spread.experts))
        return unit, {name: local for name, (local, _) in pairs.items()}

    def _shard_groups(self, strategy: Strategy, spread: _Spread, *, zero2: bool) -> ShardGroups:
        def ranks(groups: LayerGroups, field: str) -> tuple[int, ...]:
            found: tuple[int, ...] = getattr(groups, field).ranks
            return found

        groups = layer_groups(self._position, strategy)
        group = self._pool.group(getattr(groups, spread.shard_group))
        replicate = self._pool.group(getattr(groups, spread.data_group))
        assert group is not None
        if replicate is None or zero2:
            return ShardGroups(shard=group)
        peers = [Position(self._position.ranks, peer) for peer in ranks(groups, spread.data_group)]
        replicas = [ranks(layer_groups(peer, strategy), spread.shard_group) for peer in peers]
        return ShardGroups(shard=group, replicate=replicate, ranks=tuple(replicas))

    def _local(
        self, part: FilledLayer, spread: _Spread, name: str, master: nn.Parameter, rows: range | None
    ) -> LocalParameter:
        shard = part.shard(name, rows)
        divided = spread.divided(shard)
        others = spread.all - divided
        sequence = part.strategy.sequence_parallel and not shard.splits and part.layer.rules
        partial = part.tensor is not None and (sequence or name in part.partial)
        return LocalParameter(
            name=part.layer.stock_name(name),
            shard=shard,
            master=master,
            replicas=len(self._position.ranks) // degree_of(divided),
            holders=ranks_along(self._position, others),
            primary=coordinate(self._position.index, others) == 0,
            summed_over=part.tensor.group if partial and part.tensor is not None else None,
        )


def set_everywhere(layer: Layer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter under each of its names."""
    for module in layer.modules():
        for name in [key for key, value in module._parameters.items() if value is old]:
            setattr(module, name, new)
