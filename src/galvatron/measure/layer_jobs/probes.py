"""What is measured of a model's layers: the ways they are split, and with how many samples. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron.core.spec import Axis, Cluster, Kind, LayerSpec, ModelSpec, Strategy
from galvatron.measure.figures import Block
from galvatron.planner.space import LONG_SEQUENCE, divisors

__all__ = [
    "LayerBytes",
    "LayerFindings",
    "LayerProbe",
    "Variant",
    "groups_of",
    "heaviest",
    "probes_of",
    "variants_of",
]


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
    ulysses: int = 1
    """With each sample divided over so many ranks: each has a part of the tokens, and some heads of all of them."""

    @property
    def strategy(self) -> str:
        shards = 2 if self.sharded else 1
        axes = ((Kind.DP, self.ep), (Kind.SDP, shards), (Kind.ULYSSES, self.ulysses), (Kind.TP, self.tp))
        experts = ((Kind.DP, self.ulysses), (Kind.EP, self.ep)) if self.ep > 1 else ()
        return str(
            Strategy(
                tuple(Axis(kind, degree) for kind, degree in axes if degree > 1),
                experts=tuple(Axis(kind, degree) for kind, degree in experts if degree > 1),
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
        """Whether it is a layer as the stock model has it, if not all of its tokens."""
        return self.plain and self.tp == 1 and not self.grade

    @property
    def parts_of_a_batch(self) -> int:
        """Among whose ranks samples are divided."""
        return self.ep * (2 if self.sharded else 1)

    @property
    def ranks(self) -> int:
        return self.parts_of_a_batch * self.ulysses * self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProbe:
    """So many samples through a layer, forward and backward."""

    variant: Variant
    samples: int

    @property
    def size(self) -> float:
        """A device's share of them, as the cost model counts it."""
        return self.samples / self.variant.ulysses


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Memory of a layer for so many samples."""

    samples: float
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
    left_out: tuple[Variant, ...] = ()
    """What was not measured because time was over."""
    lost: float | None = None
    """Part of a GPU's memory that its allocator loses between tensors while the model trains; None: not measured."""
    sustained: float = 1.0
    """Time of a layer that runs on and on, over that of the short blocks: a GPU lowers its clocks then."""


_MOST = 8
"""Samples of a layer that is not split, where these keep a device busy."""
_MOST_EVER = 64
"""… and where they do not."""
_BUSY_S = 2e-3
"""Of one forward and backward at the device's peak rate: less work waits for kernels to start, and has its operands in
caches which a real batch does not fit."""
_FAST = 1e13
"""Operations a second from which on that is so: a GPU's, not a CPU's."""
_LONGEST_S = 2.0
"""Of one forward and backward."""
_MEMORY_SHARE = 0.25
"""Of a device's memory, for what samples take in a layer."""
_LONG_S = 0.5
"""Of one forward and backward of two long samples: nobody needs them longer."""
_LONG_SHARE = 0.5
"""Of a device's memory, for two long samples: more would not leave room for what else there is."""
_ENDS = 2
"""What a layer gives to the next one, and its gradient."""
_MOST_DIVIDED = 256
"""Devices that a sample is divided over."""
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
    more of a batch, too. Long samples of which a device cannot hold two are measured as one of the devices has them
    that they are divided over, where a layer's sequence can be divided so; other layers are counted. One sample is
    enough where two take too long or do not fit however they are divided: nothing else that a layer takes counts then.
    """
    kinds = {kind.name: kind for kind in model.kinds}
    busy = _busy(model, cluster)
    probes: list[LayerProbe] = []
    for variant in variants:
        room = _Room(kinds[variant.layer], variant, model, cluster)
        if room.too_long():
            divided, several = room.divided()
            probes += [LayerProbe(variant=divided, samples=count) for count in several if divided is not None]
            continue
        most = room.most(busy)
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


def heaviest(model: ModelSpec) -> LayerSpec:
    """The kind of layer that does most of the model's work."""
    return max(model.kinds, key=lambda own: own.forward_flops * sum(layer.name == own.name for layer in model.layers))


def _busy(model: ModelSpec, cluster: Cluster) -> int:
    """Samples that keep a device busy in most of the model: a power of two, at least as many as usual."""
    rate = cluster.device.flops_per_s(model.training.precision)
    if rate < _FAST:
        return _MOST
    wanted = min(_BUSY_S * rate / max(3 * heaviest(model).forward_flops, 1), _MOST_EVER)
    return int(2 ** math.ceil(math.log2(max(wanted, _MOST))))


@dataclass(frozen=True, slots=True)
class _Room:
    """What a device has time and memory for, of one kind of layer, split in one way."""

    kind: LayerSpec
    variant: Variant
    model: ModelSpec
    cluster: Cluster

    @property
    def _divisor(self) -> int:
        return self.variant.tp if self.kind.tensor_parallel is not None else 1

    def too_long(self) -> bool:
        """Whether two samples, which a line needs, take more than a device can be expected to have."""
        if (self.model.training.sequence_length or 0) < LONG_SEQUENCE:
            return False
        share = _LONG_SHARE if self.kind.context is None else _MEMORY_SHARE
        return 2 * self._long_bytes() > share * self.cluster.device.memory_bytes

    def divided(self) -> tuple[Variant | None, tuple[int, ...]]:
        """With samples over as few devices as have time and memory for their parts of two, and how many samples are
        measured. Where none has, over as many as can be, and one, if that one fits."""
        context = self.kind.context
        if context is None:
            return None, ()
        degrees = (1 << power for power in range(1, _MOST_DIVIDED.bit_length()))
        ways = [replace(self.variant, ulysses=degree) for degree in degrees]
        possible = [own for own in ways if context.problem(Strategy.parse(own.strategy)) is None]
        device_bytes = _LONG_SHARE * self.cluster.device.memory_bytes
        for own in possible:
            if max(self._long_bytes() / device_bytes, self._one_s() / _LONG_S) <= own.ulysses / 2:
                return own, (1, 2)
        fits = possible and self._long_bytes() / device_bytes <= possible[-1].ulysses
        return (possible[-1] if fits else None), (1,)

    def most(self, busy: int) -> int:
        """At least two, so that there is a line."""
        divided = self.kind.split_activation_bytes + self.kind.transient_bytes
        one_bytes = divided / self._divisor + self.kind.replicated_activation_bytes + _ENDS * self.kind.boundary_bytes
        room = _MEMORY_SHARE * self.cluster.device.memory_bytes
        return max(2, int(min(busy * self.variant.tp, _LONGEST_S / self._one_s(), room / max(one_bytes, 1))))

    def _one_s(self) -> float:
        rate = self.cluster.device.flops_per_s(self.model.training.precision)
        return max(3 * self.kind.forward_flops / self._divisor / rate, 1e-9)

    def _long_bytes(self) -> float:
        """Of one sample; in chunks, logits do not count."""
        kind = self.kind
        logits = kind.fused_loss.saved_bytes if self.variant.fused_loss and kind.fused_loss else 0
        saved = kind.split_activation_bytes - logits + max(kind.transient_bytes - 2 * logits, 0)
        return saved / self._divisor + kind.replicated_activation_bytes + _ENDS * kind.boundary_bytes
