"""What the ranks do when a model's layers are profiled. No torch until they do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron.profiler.figures import Block
from galvatron.spec import ModelSpec

if TYPE_CHECKING:
    from galvatron.profiler.crew import Crew

__all__ = ["LayerBytes", "LayerFindings", "LayerJob", "LayerProbe", "Way"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
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

    @property
    def strategy(self) -> str:
        axes = ["sdp2"] * self.sharded + [f"tp{self.tp}"] * (self.tp > 1)
        return ("-".join(axes) or "single") + "+sp" * self.sequence_parallel + "+rc" * self.recompute

    @property
    def ranks(self) -> int:
        return self.tp * (2 if self.sharded else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProbe:
    """So many samples through a layer, forward and backward."""

    way: Way
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
    memory: dict[Way, list[LayerBytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerJob:
    """Measure these layers."""

    model: ModelSpec
    probes: tuple[LayerProbe, ...]
    devices: int
    """Processes that measure at once: as many as will share the cores."""
    rounds: int
    block_s: float = 0.03

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(dict.fromkeys(probe.way for probe in self.probes))

    def prepare(self) -> None:
        from galvatron.profiler import layer_runs  # noqa: F401

    def measure(self, crew: Crew) -> LayerFindings:
        from galvatron.profiler.compute import device_name
        from galvatron.profiler.layer_runs import Bench
        from galvatron.profiler.rounds import Rounds, measure_in_turns
        from galvatron.rehearsal.alone import alone_as

        # Split layers run without the other ranks: what they would send to each other is measured with the cluster.
        with alone_as(0, max(way.ranks for way in self.ways)):
            bench = Bench(self.model, crew)
            largest_first = sorted(self.probes, key=lambda probe: -probe.samples)
            probes = {probe: bench.probe(probe.way, probe.samples) for probe in largest_first}
            blocks = measure_in_turns(probes, Rounds(count=self.rounds, block_s=self.block_s), crew)
            whole = [way for way in self.ways if not (way.sharded or way.recompute)]
            memory = {way: bench.memory(way, self._samples(way)) for way in whole} if crew.rank == 0 else {}
            crew.meet()
        return LayerFindings(device=device_name(crew), blocks=blocks, memory=memory)

    def _samples(self, way: Way) -> list[int]:
        return [probe.samples for probe in self.probes if probe.way == way]
