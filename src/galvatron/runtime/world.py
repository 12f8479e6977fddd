"""This process among the others: joining them, and the device it works on."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from galvatron.errors import InvalidInput

__all__ = ["join", "own_device"]


def join() -> None:
    """Join the other processes, if the program has not done so: NCCL on GPUs, gloo elsewhere."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InvalidInput(
            "no process group: start the program with torchrun, or call torch.distributed.init_process_group first"
        )
    if torch.cuda.is_available():
        device = own_device()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def own_device() -> torch.device:
    """The GPU with this process's number on its machine, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
