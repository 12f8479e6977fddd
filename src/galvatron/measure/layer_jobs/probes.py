"""What is measured of a model's layers: the ways they are split, and with how many samples. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galvatron.core.spec import Axis, Cluster, Kind, LayerSpec, ModelSpec, Strategy
from galvatron.measure.figures import Block
from galvatron.planner.space import LONG_SEQUENCE, divisors

__all__ = ["LayerBytes", "LayerFindings", "LayerProbe", "Variant", "groups_of", "probes_of", "variants_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A kind of layer, split in one way."""

    layer: str
    index: int
    """Of a layer of that kind in the model."""
    tp: int
    sequence_parallel: bool
    sharded: bool = False
    """With its parameters divided over two ranks, to see what dividing them takes besides the messages."""
    recompute: bool = False
    """With its forward run again in backward, to see what that takes besides."""
    ep: int = 1
    """With its experts divided over so many data-parallel ranks; tokens stay where they are, as many as would come."""
    fused_loss: bool = False
    """With its loss in chunks."""
    grade: str = ""
    """With all but some results recomputed, as strategies write it: "rs", "ra"."""

    @property
    def strategy(self) -> str:
        axes = ((Kind.DP, self.ep), (Kind.SDP, 2 if self.sharded else 1), (Kind.TP, self.tp))
        return str(
            Strategy(
                tuple(Axis(kind, degree) for kind, degree in axes if degree > 1),
                experts=(Axis(Kind.EP, self.ep),) if self.ep > 1 else (),
                sequence_parallel=self.sequence_parallel,
                recompute=self.recompute,
                fused_loss=self.fused_loss,
                selective_recompute=self.grade == "rs",
                recompute_but_attention=self.grade == "ra",
            )
        )

    @property
    def plain(self) -> bool:
        """Whether it is nothing but a split, or a grade of recompute: what it keeps is weighed."""
        return not (self.sharded or self.recompute or self.fused_loss) and self.ep == 1

    @property
    def whole(self) -> bool:
        """Whether it is a layer as the stock model has it."""
        return self.plain and self.ranks == 1 and not self.grade

    @property
    def ranks(self) -> int:
        return self.ep * self.tp * (2 if self.sharded else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProbe:
    """So many samples through a layer, forward and backward."""

    variant: Variant
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Memory of a layer for so many samples."""

    samples: int
    saved: int
    """More after forward than before."""
    transient: int
    """Most that backward had on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFindings:
    """All that was measured; the two parts of a block are forward and backward."""

    device: str
    blocks: dict[LayerProbe, list[Block]]
    memory: dict[Variant, list[LayerBytes]]
    sustained: float = 1.0
    """Time of a layer that runs on and on, over that of the short blocks: a GPU lowers its clocks then."""


_MOST = 8
"""Samples of a layer that is not split."""
_LONGEST_S = 2.0
"""Of one forward and backward."""
_MEMORY_SHARE = 0.25
"""Of a device's memory, for what samples take in a layer."""
_LONG_SHARE = 0.5
"""Of a device's memory, for two long samples: more would not leave room for what else there is."""
_WEIGHTS_SHARE = 0.4
"""Of a device's memory, for the parameters of layers that are measured in turns."""
_BYTES_OF_A_PARAMETER = 16
"""While a layer is measured: master, working copy, gradients of both and a buffer to sum them in."""


def variants_of(model: ModelSpec, degrees: Sequence[int], devices: int) -> tuple[Variant, ...]:
    """Every kind of layer whole, split as far as it can be, with its experts divided, with its parameters sharded, and
    recomputed as a whole and in part."""
    first = {layer.name: index for index, layer in reversed(list(enumerate(model.layers)))}
    other = [
        Variant(
            layer=kind.name,
            index=first[kind.name],
            tp=1,
            sequence_parallel=False,
            sharded=sharded,
            recompute=not sharded,
        )
        for kind in model.kinds
        for sharded in (True, False)
        if not sharded or (devices > 1 and kind.parameters)
    ]
    split = [
        Variant(layer=kind.name, index=first[kind.name], tp=degree, sequence_parallel=sequence, fused_loss=fused)
        for kind in model.kinds
        for degree in degrees
        if degree == 1 or (kind.tensor_parallel is not None and kind.allows_tensor_parallel(degree))
        for sequence in (False, True)
        if not sequence or (degree > 1 and kind.allows_sequence_parallel(degree))
        for fused in (False, True)
        if not fused or (kind.fused_loss is not None and not sequence)
    ]
    divided = [
        Variant(layer=kind.name, index=first[kind.name], tp=1, sequence_parallel=False, ep=degree)
        for kind in model.kinds
        for degree in divisors(devices)
        if degree > 1 and kind.experts is not None and kind.experts.count % degree == 0
    ]
    graded = [
        Variant(layer=kind.name, index=first[kind.name], tp=1, sequence_parallel=False, grade=grade)
        for kind in model.kinds
        for grade, facts in (("rs", kind.selective), ("ra", kind.but_attention))
        if facts is not None
    ]
    return (*split, *divided, *other, *graded)


def probes_of(model: ModelSpec, cluster: Cluster, variants: Sequence[Variant]) -> tuple[LayerProbe, ...]:
    """Each way with one sample and with more, as far as time and memory go.

    A layer that TP divides gets as many times the samples, so that there is as much to do; a group of TP has that many
    more of a batch, too. Long samples of which a device cannot hold two are not measured: such layers are counted.
    """
    kinds = {kind.name: kind for kind in model.kinds}
    probes = []
    for variant in variants:
        if _too_long(kinds[variant.layer], variant, model, cluster):
            continue
        most = _most(kinds[variant.layer], variant, model, cluster)
        counts = sorted({1, *(max(1, most // part) for part in (8, 4, 2, 1))})
        probes += [LayerProbe(variant=variant, samples=count) for count in counts]
    return tuple(probes)


def groups_of(probes: Sequence[LayerProbe], model: ModelSpec, cluster: Cluster) -> tuple[tuple[LayerProbe, ...], ...]:
    """The probes in groups whose layers are there at the same time: all of them, if memory allows."""
    kinds = {kind.name: kind for kind in model.kinds}
    room = _WEIGHTS_SHARE * cluster.device.memory_bytes
    groups: list[list[LayerProbe]] = []
    held = 0.0
    for variant in dict.fromkeys(probe.variant for probe in probes):
        kind = kinds[variant.layer]
        whole = kind.replicated_parameters if kind.tensor_parallel is not None else kind.parameters
        parameters = whole + (kind.parameters - whole) / variant.tp
        held += _BYTES_OF_A_PARAMETER * parameters
        if not groups or held > room:
            groups.append([])
            held = _BYTES_OF_A_PARAMETER * parameters
        groups[-1] += [probe for probe in probes if probe.variant == variant]
    return tuple(map(tuple, groups))


def _too_long(kind: LayerSpec, variant: Variant, model: ModelSpec, cluster: Cluster) -> bool:
    """Whether two samples, which a line needs, take more than a device can be expected to have."""
    if (model.training.sequence_length or 0) < LONG_SEQUENCE:
        return False
    logits = kind.fused_loss.saved_bytes if variant.fused_loss and kind.fused_loss else 0
    saved = kind.split_activation_bytes - logits + max(kind.transient_bytes - 2 * logits, 0)
    parts = variant.tp if kind.tensor_parallel is not None else 1
    two = 2 * (saved / parts + kind.replicated_activation_bytes + kind.boundary_bytes)
    return two > _LONG_SHARE * cluster.device.memory_bytes


def _most(kind: LayerSpec, variant: Variant, model: ModelSpec, cluster: Cluster) -> int:
    """At least two, so that there is a line."""
    parts = variant.tp if kind.tensor_parallel is not None else 1
    one_s = 3 * kind.forward_flops / parts / cluster.device.flops_per_s(model.training.precision)
    divided = kind.split_activation_bytes + kind.transient_bytes
    one_bytes = divided / parts + kind.replicated_activation_bytes + kind.boundary_bytes
    room = _MEMORY_SHARE * cluster.device.memory_bytes
    return max(2, int(min(_MOST * variant.tp, _LONGEST_S / max(one_s, 1e-9), room / max(one_bytes, 1))))
