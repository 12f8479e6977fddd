"""What the ranks do when a model's layers are profiled. No torch until they do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron.core.spec import ModelSpec
from galvatron.measure.layer_jobs.probes import LayerFindings, LayerProbe, Variant

if TYPE_CHECKING:
    from galvatron.processes.peers import Peers

__all__ = ["LayerJob"]


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
    def variants(self) -> tuple[Variant, ...]:
        return tuple(dict.fromkeys(probe.variant for probe in self.probes))

    def prepare(self) -> None:
        from galvatron.measure.layer_jobs import runs  # noqa: F401

    def measure(self, peers: Peers) -> LayerFindings:
        from galvatron.measure.cluster_jobs.compute import device_name
        from galvatron.measure.layer_jobs.runs import Bench
        from galvatron.measure.rehearsal.alone import alone_as
        from galvatron.measure.timing import Rounds, measure_in_turns

        # Split layers run without the other ranks: what they would send to each other is measured with the cluster.
        with alone_as(0, max(variant.ranks for variant in self.variants)):
            bench = Bench(self.model, peers)
            largest_first = sorted(self.probes, key=lambda probe: -probe.samples)
            probes = {probe: bench.probe(probe.variant, probe.samples) for probe in largest_first}
            blocks = measure_in_turns(probes, Rounds(count=self.rounds, block_s=self.block_s), peers)
            plain = (variant for variant in self.variants if not (variant.sharded or variant.recompute))
            whole = [variant for variant in plain if variant.ep == 1]
            memory = (
                {variant: bench.memory(variant, self._samples(variant)) for variant in whole} if peers.rank == 0 else {}
            )
            peers.meet()
        return LayerFindings(device=device_name(peers), blocks=blocks, memory=memory)

    def _samples(self, variant: Variant) -> list[int]:
        return [probe.samples for probe in self.probes if probe.variant == variant]
