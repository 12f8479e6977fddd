"""What the ranks do when a cluster is profiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from galvatron.measure.cluster_jobs.findings import ClusterFindings, ClusterProbe

if TYPE_CHECKING:
    from galvatron.processes.peers import Peers

__all__ = ["ClusterJob"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """Measure all links and the device."""

    devices: int | None
    rounds: int
    block_s: float = 0.06
    """Long beside the ticks of a hundredth of a second in which the system counts processors' time; twice as long
    where processes share cores, because they take turns."""

    def prepare(self) -> None:
        from galvatron.measure.cluster_jobs import compute, links  # noqa: F401

    def measure(self, peers: Peers) -> ClusterFindings:
        import torch.distributed as dist

        from galvatron.measure.cluster_jobs.compute import device_facts, device_probes
        from galvatron.measure.cluster_jobs.links import link_probes
        from galvatron.measure.timing import Probe, Rounds, measure_in_turns

        peers.join()
        try:
            probes: dict[ClusterProbe, Probe] = {**dict(device_probes(peers)), **dict(link_probes(peers))}
            block_s = self.block_s * min(peers.contention, 2.0)
            found = measure_in_turns(probes, Rounds(count=self.rounds, block_s=block_s), peers)
            return ClusterFindings(
                devices=peers.world,
                per_node=peers.local_world,
                device=device_facts(peers),
                backend=dist.get_backend(),
                contention=peers.contention,
                blocks=found,
            )
        finally:
            dist.destroy_process_group()
