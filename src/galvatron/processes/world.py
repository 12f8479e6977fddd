"""This process among the others: the network between machines, meeting and joining them, its own device.

torchrun keeps one store for all its restarts, and PyTorch looks up the others' addresses under the same names each
time: those of processes that are dead. So each start of a job agrees on a name of its own.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from galvatron.core.errors import InvalidInput, RankFailure
from galvatron.processes.virtual import be_virtual, virtual_devices

__all__ = [
    "agreed_name",
    "cap_memory",
    "capped",
    "choose_interface",
    "claim_device",
    "interface_of",
    "join",
    "meet",
    "own_device",
    "workspace_bytes",
]

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


def choose_interface() -> None:
    """Where the job has several machines and the host's name leads nowhere else, take the interface towards the machine
    through which the ranks meet, unless the user has said which."""
    several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if _VARIABLE in os.environ or not several or not _stays_here(socket.gethostname()):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        name = interface_of(towards.getsockname()[0])
        if name is not None:
            os.environ[_VARIABLE] = name


def _stays_here(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def interface_of(address: str) -> str | None:
    """The interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # interfaces without an address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


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


_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Its settings in the environment, by their name and their old name."""


_MEETING = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says besides the rank."""


def join(*, alone: bool = False, in_turn: bool = False) -> None:
    """Join the other processes, if the program has not done so: NCCL on GPUs, gloo elsewhere. ``alone``: without
    torchrun there is just this one, as in a notebook; ``in_turn``: see :func:`be_virtual`."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ and not alone:
        raise InvalidInput(
            "no process group: start the program with torchrun, or call torch.distributed.init_process_group first"
        )
    missing = [name for name in _MEETING if name not in os.environ]
    if "RANK" in os.environ and missing:
        raise InvalidInput(
            f"RANK is set to {os.environ['RANK']}, but {' and '.join(missing)} not; start the program with torchrun, "
            "which sets them all, or set them"
        )
    if "RANK" in os.environ:
        _check_numbers()
    device = claim_device(int(os.environ.get("RANK", 0)), in_turn=in_turn)
    store, rank, world = meet() if "RANK" in os.environ else (HashStore(), 0, 1)
    if device.type == "cuda":
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _check_numbers() -> None:
    """Refuse what no rank can meet by, which would end in an error of PyTorch, or never."""
    for name, most in (("WORLD_SIZE", 2**20), ("RANK", 2**20), ("MASTER_PORT", 65535)):
        text = os.environ[name]
        if not text.isdecimal() or int(text) > most:
            raise InvalidInput(f"{name}: {text!r} is set; expected a whole number up to {most}, as torchrun sets it")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world:
        raise InvalidInput(f"RANK: {rank} is set, but WORLD_SIZE is {world}; expected a rank below it, counted from 0")


def claim_device(rank: int, *, in_turn: bool = False) -> torch.device:
    """This process's device, made ready: call it before anything uses CUDA. ``in_turn``: see :func:`be_virtual`.

    The allocator is told to let its segments grow (unless the user has told it something). Else it holds up to half as
    much again as there are tensors where layers are sharded, and a plan that fits may run out of memory.
    """
    device = own_device()
    if device.type == "cuda":
        be_virtual(rank, in_turn=in_turn)
        let_segments_grow()
        torch.cuda.set_device(device)
    return device


def let_segments_grow() -> None:
    """Tell PyTorch's allocator of GPUs so, before it gives anything away."""
    if not any(name in os.environ for name in _ALLOCATOR):
        # Not through the environment, which it may have read by now.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def own_device() -> torch.device:
    """The GPU with this process's number on its machine, the one that virtual GPUs share, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if virtual_devices() is not None:
        return torch.device("cuda", 0)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def cap_memory(device: torch.device, tensor_bytes: int) -> None:
    """Let a virtual GPU have no more memory for tensors than the device that it stands for."""
    if device.type == "cuda" and virtual_devices() is not None:
        _, total = torch.cuda.mem_get_info(device)
        # The same allocator serves workspaces, which are not among the tensors.
        most = tensor_bytes + workspace_bytes(device)
        torch.cuda.set_per_process_memory_fraction(min(most / total, 1.0), device)


@contextmanager
def capped(device: torch.device, most_bytes: int) -> Iterator[None]:
    """While this lasts, a GPU's allocator has no more of its memory; tensors and workspaces are in it.

    A virtual GPU gets another limit. Of a real one the rest is taken, for an allocator with a limit runs short before
    it is reached: it counts what it is asked for in full, also where a part of that is free already.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if virtual_devices() is None:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # memory of its own
            rest = free - (most_bytes - torch.cuda.memory_reserved(device))
            taken = torch.empty(max(rest, 0), dtype=torch.uint8, device=device)
        try:
            yield
        finally:
            del taken
            torch.cuda.empty_cache()
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(most_bytes / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def shortages(device: torch.device) -> int:
    """How often PyTorch's allocator has run short of a GPU's memory so far, gave back what it kept and asked again."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def workspace_bytes(device: torch.device) -> int:
    """What matrix products on a GPU keep for themselves; forward's and backward's thread each have such a place."""
    given = torch.ones(32, 32, device=device, requires_grad=True)
    torch.autograd.backward((given @ given).sum())
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)
