"""Counts what a rank keeps alive: all tensors, each storage once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from oracle import Case
from parity import build
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import galvatron
from galvatron.runtime.model import ParallelModel

__all__ = ["kept_by_forward", "watch"]


def _live_bytes(model: ParallelModel) -> int:
    """Of what was made since :func:`_forget`; when it stays the same: gloo lets go of tensors a little later."""
    found, before = _counted(model), -1
    while found != before:
        time.sleep(0.1)
        found, before = _counted(model), found
    return found


def _counted(model: ParallelModel) -> int:
    gradients = [parameter.grad for parameter in model.parameters()]  # gives each an object
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor) and not isinstance(found, FakeTensor) and not found.is_meta:
            storage = getattr(found, "_local_tensor", found).untyped_storage()
            storages[storage._cdata] = storage
    del gradients
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages.values() if storage.nbytes()}.values())


def _forget() -> None:
    """Leave out what is there now: looking at it again and again would take longer than the test itself."""
    gc.collect()
    gc.freeze()


def _call_before(model: ParallelModel, forward: Callable[[], None], backward: Callable[[], None]) -> None:
    """Call these before each micro-batch's forward and backward."""
    model._pipeline.stage.register_forward_pre_hook(lambda _, __: forward(), prepend=True)
    unit = model._units[0]
    expect = unit.expect_backward

    def expect_backward(*, last: bool) -> None:
        backward()
        expect(last=last)

    unit.expect_backward = expect_backward  # type: ignore[method-assign]


def watch(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> dict[str, list[float]]:
    """On a rank: what is alive before each forward, before each backward and at the end of each iteration, in multiples
    of the whole model's parameters in fp32."""
    _forget()
    model = build(case, plan, folder)
    unit = 4 * sum(torch.Size(shape).numel() for shape in model._shapes.values())
    seen: dict[str, list[float]] = {"forward": [], "backward": [], "end": []}

    def look(when: str) -> None:
        seen[when].append(_live_bytes(model) / unit)

    _call_before(model, lambda: look("forward"), lambda: look("backward"))
    for batch in given:
        model.forward_backward(batch)
        look("end")
        for parameter in model.parameters():
            parameter.grad = None
    return seen


def kept_by_forward(
    case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor], iterations: int = 1
) -> int:
    """On a rank: bytes that the last of so many forwards keeps for backward."""
    _forget()
    model = build(case, plan, folder)
    seen: list[int] = []

    def look() -> None:
        seen.append(_live_bytes(model))

    _call_before(model, look, look)
    for _ in range(iterations):
        model.forward_backward(batch)
    return seen[-1] - seen[-2]
