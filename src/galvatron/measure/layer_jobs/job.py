"""What the ranks do when a model's layers are profiled. No torch until they do it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron.core.errors import GalvatronError
from galvatron.core.spec import ModelSpec
from galvatron.measure.figures import Block
from galvatron.measure.layer_jobs.probes import LayerBytes, LayerFindings, LayerProbe, Variant, heaviest
from galvatron.planner.plan.plan import Plan

if TYPE_CHECKING:
    from galvatron.processes.peers import Peers

__all__ = ["LayerJob"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerJob:
    """Measure these layers."""

    model: ModelSpec
    groups: tuple[tuple[LayerProbe, ...], ...]
    """Measured in turns; the layers of one group are there at the same time."""
    devices: int
    """Processes that measure at once: as many as will share the cores."""
    rounds: int
    block_s: float = 0.03
    tensor_bytes: int | None = None
    """Of a device's memory; None: all that there is. Virtual devices share one, and must not take each other's."""

    limit_s: float | None = None
    """Seconds after which only what no plan can do without is measured; None: all is, however long it takes."""
    plan: Plan | None = None
    """Of which one rank is rehearsed on a GPU, to see what its allocator loses between tensors; None: nobody asks."""

    @property
    def probes(self) -> tuple[LayerProbe, ...]:
        return tuple(probe for group in self.groups for probe in group)

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(dict.fromkeys(probe.variant for probe in self.probes))

    def prepare(self) -> None:
        from galvatron.measure.layer_jobs import runs  # noqa: F401

    def measure(self, peers: Peers) -> LayerFindings:
        from galvatron.measure.cluster_jobs.compute import device_name
        from galvatron.measure.layer_jobs.runs import Bench
        from galvatron.measure.rehearsal.alone import alone_as
        from galvatron.measure.timing import Rounds, measure_in_turns, slowdown_when_sustained
        from galvatron.processes.world import cap_memory

        if self.tensor_bytes is not None:
            cap_memory(peers.device, self.tensor_bytes)
        rounds = Rounds(count=self.rounds, block_s=self.block_s)
        blocks: dict[LayerProbe, list[Block]] = {}
        memory: dict[Variant, list[LayerBytes]] = {}
        left = len(self.probes)
        sustained = 1.0
        # Split layers run without the other ranks: what they would send to each other is measured with the cluster.
        with alone_as(0, max(variant.ranks for variant in self.variants)):
            bench = Bench(self.model, peers, limit_s=self.limit_s)
            bench.compile_ahead(self.probes)
            for group in self.groups:
                done, left = len(self.probes) - left, left - len(group)
                probes = bench.fitting(sorted(group, key=lambda probe: -probe.size))
                blocks |= measure_in_turns(probes, rounds, peers, warm=True, before=done, after=left)
                longest = self._heaviest(probes)
                if longest is not None and peers.device.type == "cuda":
                    sustained = max(sustained, slowdown_when_sustained(probes[longest], blocks[longest], peers))
                for variant in dict.fromkeys(probe.variant for probe in probes):
                    if variant.plain and peers.rank == 0:
                        memory[variant] = bench.memory([probe for probe in probes if probe.variant == variant])
                peers.meet()
                del probes
                bench.clear()
        return LayerFindings(
            device=device_name(peers),
            blocks=blocks,
            memory=memory,
            left_out=tuple(bench.left_out),
            lost=None if bench.late() else self._lost(peers),
            sustained=sustained,
        )

    def _lost(self, peers: Peers) -> float | None:
        """Measured by one rank, while the others wait."""
        if self.plan is None or peers.device.type != "cuda":
            return None
        lost = None
        peers.report(len(self.probes), len(self.probes), "what the allocator loses")
        if peers.rank == 0:
            from galvatron.measure.rehearsal.rehearse import rehearse_rank

            fullest = max(self.plan.stages, key=lambda stage: stage.memory_bytes)
            try:
                lost = rehearse_rank(self.plan, fullest.devices[0], device=peers.device, steps=0).lost
            except (GalvatronError, RuntimeError) as error:  # out of memory, mostly; layers are measured all the same
                _LOG.warning("what the allocator loses is not measured: %s", str(error).partition("\n")[0])
        peers.meet()
        return lost

    def _heaviest(self, probes: Iterable[LayerProbe]) -> LayerProbe | None:
        """That of the kind of layer that does most of the model's work, if it is among them."""
        name = heaviest(self.model).name
        own = [probe for probe in probes if probe.variant.layer == name and probe.variant.whole]
        return max(own, key=lambda probe: probe.size, default=None)
