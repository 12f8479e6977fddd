"""This process among the others: joining them, and the device it works on."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from galvatron.errors import InvalidInput
from galvatron.runtime.meeting import meet
from galvatron.virtual import be_virtual, virtual_devices

__all__ = ["cap_memory", "claim_device", "join", "own_device", "workspace_bytes"]

_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Its settings in the environment, by their name and their old name."""


def join() -> None:
    """Join the other processes, if the program has not done so: NCCL on GPUs, gloo elsewhere."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InvalidInput(
            "no process group: start the program with torchrun, or call torch.distributed.init_process_group first"
        )
    device = claim_device(int(os.environ["RANK"]))
    store, rank, world = meet()
    if device.type == "cuda":
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def claim_device(rank: int) -> torch.device:
    """This process's device, made ready: call it before anything uses CUDA.

    The allocator is told to let its segments grow (unless the user has told it something). Else it holds up to half as
    much again as there are tensors where layers are sharded, and a plan that fits may run out of memory.
    """
    device = own_device()
    if device.type == "cuda":
        be_virtual(rank)
        if not any(name in os.environ for name in _ALLOCATOR):
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
        torch.cuda.set_device(device)
    return device


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


def workspace_bytes(device: torch.device) -> int:
    """What matrix products on a GPU keep for themselves; forward's and backward's thread each have such a place."""
    given = torch.ones(32, 32, device=device, requires_grad=True)
    torch.autograd.backward((given @ given).sum())
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)
