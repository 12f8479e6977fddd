"""Jobs for a fork_server's ranks: a module of its own, so that they can import it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OneRankFails", "TellRank"]


@dataclass(frozen=True)
class TellRank:
    """Each rank says who it is, after all have met."""

    def run(self, rank: int) -> tuple[int, int, bool]:
        import torch.distributed as dist

        from galvatron.processes.world import join

        fresh = not dist.is_initialized()
        join()
        dist.barrier()
        return dist.get_rank(), dist.get_world_size(), fresh


@dataclass(frozen=True)
class OneRankFails:
    """Rank 1 fails in some way while the others wait for it."""

    way: str

    def run(self, rank: int) -> None:
        import os
        import time

        import torch
        import torch.distributed as dist

        from galvatron.processes.world import join

        join()
        if rank == 1:
            if self.way == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if self.way == "error":
                raise ValueError("no such thing")
            if self.way == "death":
                os._exit(7)
            time.sleep(3600)
        dist.barrier()
