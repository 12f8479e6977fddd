"""Where the processes of a job meet: a store of their own, also when torchrun starts them again.

torchrun keeps one store for all its restarts, and PyTorch looks up the others' addresses under the same names each
time: those of processes that are dead. The number of restarts tells them apart on one machine alone, because every
machine's agent counts its own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from galvatron.errors import RankFailure
from galvatron.runtime.interface import choose_interface

__all__ = ["agreed_name", "meet"]

_PATIENCE_S = 1800.0
"""How long ranks wait for each other to start, as in PyTorch."""
_PAUSE_S = 0.05
_CURRENT = "galvatron/meeting"
"""The name that rank 0 has given to its start, the newest or one before."""


def meet() -> tuple[Store, int, int]:
    """The store of this start of the job, this process's rank, and how many there are."""
    choose_interface()
    store, rank, world = next(rendezvous("env://"))
    return PrefixStore(agreed_name(store, rank, world), store), rank, world


def agreed_name(store: Store, rank: int, world: int, patience_s: float = _PATIENCE_S) -> str:
    """A name for this start of the job that all its ranks know and that no other start has.

    Rank 0 makes one up. The others answer whatever name they find with one of their own, and it is the right one when
    rank 0 says that it has heard them: it did so in an earlier start too, but then it heard others.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set(_CURRENT, own)
        answers = [f"{own}/{other}" for other in range(1, world)]
        store.wait(answers, timedelta(seconds=patience_s))
        store.set(f"{own}/heard", " ".join(store.get(answer).decode() for answer in answers))
        return own
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if store.check([_CURRENT]):
            name = store.get(_CURRENT).decode()
            store.set(f"{name}/{rank}", own)
            if store.check([f"{name}/heard"]) and own in store.get(f"{name}/heard").decode().split():
                return name
        time.sleep(_PAUSE_S)
    raise RankFailure(f"rank {rank}: rank 0 has not come within {patience_s:g} s; see how it ended")
