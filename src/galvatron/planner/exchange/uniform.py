"""A layout that all blocks of a model share, in the words of the systems that people train with.

Those systems give every block the same degrees. A plan of ours that does so too is such a layout; any other is refused
with the layer that differs. Knows nothing of how a system spells its options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import LAYER_SWITCHES, ONE_F_ONE_B, Axis, Kind, LayerSpec, ModelSpec, Strategy
from galvatron.planner.plan.plan import Plan

__all__ = ["Inexpressible", "Recompute", "Sharding", "Uniform", "check_shape", "stages_of", "uniform_of"]


class Inexpressible(InvalidInput):
    """A plan that no uniform layout is, or that a system has no options for; the message names the layer."""


class Sharding(StrEnum):
    """What data-parallel ranks divide among them."""

    NONE = "none"
    OPTIMIZER = "optimizer states"
    """ZeRO-1, Megatron's distributed optimizer."""
    GRADIENTS = "optimizer states and gradients"
    """ZeRO-2."""
    PARAMETERS = "optimizer states, gradients and parameters"
    """ZeRO-3, FSDP."""


class Recompute(StrEnum):
    """What backward computes again in a block."""

    NONE = "none"
    SELECTIVE = "all but matrix products and attention"
    BUT_ATTENTION = "all but attention"
    FULL = "all"


_SWITCH = {
    Recompute.SELECTIVE: "selective_recompute",
    Recompute.BUT_ATTENTION: "recompute_but_attention",
    Recompute.FULL: "recompute",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Degrees and sizes. Ranks are ordered pipeline, replicas, shards, tensor; the last are neighbours."""

    batch: int
    """Samples of an iteration."""
    micro_batches: int
    pipeline: int = 1
    blocks: tuple[int, ...] = ()
    """Blocks of each stage; the embedding is in the first, the head in the last."""
    schedule: str = ONE_F_ONE_B.name
    replicas: int = 1
    """Data-parallel groups that hold whole copies of all states."""
    shards: int = 1
    """Data-parallel ranks in each group, among which ``sharding`` divides."""
    sharding: Sharding = Sharding.NONE
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    """Into how many parts experts are divided by their number; 1: they follow the rest of the block."""
    expert_tensor: int = 1
    """With ``expert`` above 1: tensor parallelism inside each expert."""
    recompute: Recompute = Recompute.NONE
    recomputed: int | None = None
    """How many blocks of each stage are recomputed; None: all."""
    fused_loss: bool = False

    @property
    def data(self) -> int:
        """Into how many parts the batch is divided."""
        return self.replicas * self.shards

    @property
    def devices(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def divides(self) -> bool:
        """Whether experts find a place among the devices of a stage."""
        whole = self.shards * self.tensor if self.sharding is Sharding.PARAMETERS else self.data * self.tensor
        return self.expert == 1 or whole % (self.expert * self.expert_tensor) == 0

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch on one data-parallel rank."""
        return self.batch // self.micro_batches // self.data

    @property
    def base(self) -> Strategy:
        """What the strategies of all layers have in common, and sequence parallelism where a layer can have it."""
        zero = self.sharding in (Sharding.OPTIMIZER, Sharding.GRADIENTS)
        replicas = self.shards if zero else self.replicas
        degrees = (replicas, 1 if zero else self.shards, self.tensor)
        return Strategy(
            _axes((Kind.DP, Kind.SDP, Kind.TP), degrees), zero2=zero, sequence_parallel=self.sequence_parallel
        )

    def outside(self, layer: LayerSpec) -> Strategy:
        """The strategy of the embedding, and of the head but for its loss."""
        divides = layer.allows_sequence_parallel(self.tensor)
        return replace(self.base, sequence_parallel=self.sequence_parallel and divides)

    def head(self, layer: LayerSpec) -> Strategy:
        """The strategy of the head."""
        return replace(self.outside(layer), fused_loss=self.fused_loss)

    def block(self, layer: LayerSpec, *, recomputed: bool = True) -> Strategy:
        """The strategy of a block."""
        strategy = self.base
        if recomputed and self.recompute is not Recompute.NONE:
            grade: dict[str, Any] = {_SWITCH[self.recompute]: True}
            strategy = replace(strategy, **grade)
        if layer.experts is None or self.expert == 1:
            return strategy
        sharded = self.sharding is Sharding.PARAMETERS
        rest = self.devices // self.pipeline // (self.expert * self.expert_tensor)
        replicas = self.replicas if sharded else rest
        degrees = (replicas, rest // replicas, self.expert, self.expert_tensor)
        return replace(strategy, experts=_axes((Kind.DP, Kind.SDP, Kind.EP, Kind.TP), degrees))

    def of_kind(self, kind: LayerSpec, model: ModelSpec) -> Strategy:
        """The strategy of a kind of layer, where all blocks recompute alike."""
        if kind.name == model.layers[0].name:
            return self.outside(kind)
        return self.head(kind) if kind.name == model.layers[-1].name else self.block(kind)


def _axes(kinds: tuple[Kind, ...], degrees: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple(Axis(kind, degree) for kind, degree in zip(kinds, degrees, strict=True) if degree > 1)


def stages_of(layout: Uniform, model: ModelSpec) -> tuple[tuple[Strategy, ...], ...]:
    """The strategy of each layer, by stage."""
    blocks = model.layers[1:-1]
    counts = layout.blocks or (len(blocks),)
    stages: list[tuple[Strategy, ...]] = []
    begin = 0
    for number, count in enumerate(counts):
        most = count if layout.recomputed is None else layout.recomputed
        stage = [
            layout.block(block, recomputed=place < most) for place, block in enumerate(blocks[begin : begin + count])
        ]
        begin += count
        first, last = number == 0, number == len(counts) - 1
        embedding, head = layout.outside(model.layers[0]), layout.head(model.layers[-1])
        stages.append((*([embedding] * first), *stage, *([head] * last)))
    return tuple(stages)


def uniform_of(plan: Plan) -> Uniform:
    """The layout that a plan is, or :class:`Inexpressible` with the layer that has none."""
    model = plan.model.spec()
    check_shape(model)
    strategies = [strategy for stage in plan.stages for strategy in stage.strategies]
    first = strategies[1]
    _check_axes(first, 1, model)
    blocks = _blocks(plan)
    owner = next((each for each in strategies[1:-1] if each.experts), first)
    base = Uniform(
        batch=plan.batch,
        micro_batches=plan.micro_batches,
        pipeline=plan.pipeline_degree,
        blocks=blocks,
        schedule=plan.schedule,
        replicas=1 if first.zero2 else first.degree(Kind.DP),
        shards=first.degree(Kind.DP) if first.zero2 else first.degree(Kind.SDP),
        sharding=_sharding(first),
        tensor=first.degree(Kind.TP),
        sequence_parallel=first.sequence_parallel,
        expert=_expert_degree(owner, Kind.EP),
        expert_tensor=_expert_degree(owner, Kind.TP),
        fused_loss=strategies[-1].fused_loss,
    )
    layout = _with_recompute(base, plan, strategies)
    expected = [strategy for stage in stages_of(layout, model) for strategy in stage]
    stages = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    for index, (given, wanted) in enumerate(zip(strategies, expected, strict=True)):
        moved = layout.recomputed is not None and 0 < index < len(strategies) - 1  # which of a stage's blocks is alike
        if (replace(given, recompute=wanted.recompute) if moved else given) != wanted:
            raise Inexpressible(
                f"layer {index} ({model.layers[index].name}) of stage {stages[index]} has strategy {str(given)!r} "
                f"where one for all blocks would be {str(wanted)!r}"
            )
    return layout


def check_shape(model: ModelSpec) -> None:
    """Raise for a model that is no embedding, blocks and head."""
    names = [layer.name for layer in model.layers]
    carried = {layer.boundary_bytes for layer in model.layers[:-1]}  # two stacks carry both, pyramids ever less
    if len(names) < 3 or names[0] in names[1:] or names[-1] in names[:-1] or len(carried) > 1:
        raise Inexpressible(
            f"{model.name} is not an embedding, a stack of blocks and a head, of which other systems' options speak"
        )


def _check_axes(strategy: Strategy, index: int, model: ModelSpec) -> None:
    """Only kinds and orders of axes that other systems have: replicas over shards over tensor parallelism."""
    order = [axis.kind for axis in strategy.axes]
    strange = [kind for kind in order if kind not in (Kind.DP, Kind.SDP, Kind.TP)]
    if strange:
        raise Inexpressible(
            f"layer {index} ({model.layers[index].name}) has strategy {str(strategy)!r}: no layout of other systems is "
            f"known with {strange[0]}"
        )
    if order != [kind for kind in (Kind.DP, Kind.SDP, Kind.TP) if kind in order]:
        raise Inexpressible(
            f"layer {index} ({model.layers[index].name}) has strategy {str(strategy)!r}, whose axes are not DP over "
            "SDP over TP: other systems put tensor-parallel ranks next to each other"
        )
    known = {"recompute", "selective_recompute", "recompute_but_attention", "sequence_parallel", "zero2", "fused_loss"}
    other = [switch for switch in LAYER_SWITCHES if getattr(strategy, switch.name) and switch.name not in known]
    if other:
        raise Inexpressible(
            f"layer {index} ({model.layers[index].name}) has strategy {str(strategy)!r}: no layout of other systems is "
            f"known with {other[0].title}"
        )


def _blocks(plan: Plan) -> tuple[int, ...]:
    counts = [len(stage.layers) for stage in plan.stages]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _sharding(strategy: Strategy) -> Sharding:
    if strategy.degree(Kind.SDP) > 1:
        return Sharding.PARAMETERS
    return Sharding.GRADIENTS if strategy.zero2 else Sharding.NONE


def _expert_degree(strategy: Strategy, kind: Kind) -> int:
    return next((axis.degree for axis in strategy.experts if axis.kind is kind), 1)


def _with_recompute(layout: Uniform, plan: Plan, strategies: list[Strategy]) -> Uniform:
    """With what blocks recompute: one grade for all, or all of it in equally many blocks of each stage."""
    grades = [_grade(strategy) for strategy in strategies[1:-1]]
    if len(set(grades)) == 1:
        return replace(layout, recompute=grades[0])
    index = next(place for place, grade in enumerate(grades) if grade is not grades[0]) + 1
    mixed = Inexpressible(
        f"layer {index} ({plan.model.spec().layers[index].name}) recomputes {grades[index - 1]}, layer 1 {grades[0]}: "
        "other systems recompute alike in all blocks"
    )
    if set(grades) != {Recompute.NONE, Recompute.FULL}:
        raise mixed
    begin, counts = 0, []
    for count in layout.blocks:
        counts.append(sum(grade is Recompute.FULL for grade in grades[begin : begin + count]))
        begin += count
    most = max(counts)
    if any(count != min(most, of) for count, of in zip(counts, layout.blocks, strict=True)):
        raise mixed
    return replace(layout, recompute=Recompute.FULL, recomputed=most)


def _grade(strategy: Strategy) -> Recompute:
    return next((grade for grade, switch in _SWITCH.items() if getattr(strategy, switch)), Recompute.NONE)
