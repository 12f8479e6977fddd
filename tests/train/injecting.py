"""Faults for tests: something goes wrong on one rank at one step of its training."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from galvatron.runtime.batches import Reader
from galvatron.runtime.model import ParallelModel

__all__ = [
    "Fault",
    "alter",
    "ask_to_stop",
    "fail",
    "fail_at",
    "other_labels",
    "spoil",
    "stall",
    "stall_writing",
    "starve",
    "stop_if_settled",
]

Fault = Callable[[ParallelModel], None]


def fail_at(rank: int, victim: int, step: int, fault: Fault) -> None:
    """On the rank with number ``victim``: let this happen when forward and backward of that step are done."""
    if rank != victim:
        return
    real = ParallelModel.forward_backward
    calls = 0

    def forward_backward(self: ParallelModel, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = real(self, batch)
        if calls == step:
            fault(self)
        return loss

    patch.object(ParallelModel, "forward_backward", forward_backward).start()


def other_labels(rank: int, victim: int, step: int) -> None:
    """On the rank with number ``victim``: one other label in the batch of that step."""
    if rank != victim:
        return
    real = Reader.local
    calls = 0

    def local(self: Reader, batch: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            labels = batch["labels"].clone()
            labels[0, 1] = (labels[0, 1] + 1) % 8
            batch = {**batch, "labels": labels}
        return real(self, batch, **options)

    patch.object(Reader, "local", local).start()


def fail(model: ParallelModel) -> None:
    raise ZeroDivisionError("on purpose")


def stall(model: ParallelModel) -> None:
    """Never come back, though alive."""
    while True:
        time.sleep(0.05)


def stall_writing(rank: int, victim: int, step: int) -> None:
    """On the rank with number ``victim``: never come back from writing the checkpoint of that step."""
    if rank != victim:
        return
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if f"step-{step:08}.partial" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(3600)
        real(descriptor)

    patch.object(os, "fsync", fsync).start()


def spoil(model: ParallelModel) -> None:
    """An infinite element in one gradient."""
    gradient = next(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    gradient.view(-1)[0] = torch.inf


def alter(model: ParallelModel) -> None:
    """Other values in a parameter that other ranks hold too, as a faulty device would leave."""
    local = next(local for local in model.locals if len(local.holders) > 1)
    with torch.no_grad():
        local.master.add_(1.0)


def starve(model: ParallelModel) -> None:
    """No more memory from the system."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
    torch.empty(1 << 30)


def ask_to_stop(model: ParallelModel) -> None:
    """As a scheduler would."""
    os.kill(os.getpid(), signal.SIGTERM)


def stop_if_settled(model: ParallelModel) -> None:
    """The same, where the garbage collector passes over the model by now; fails where it does not."""
    assert not any(one is model for one in gc.get_objects())
    ask_to_stop(model)
