"""The CPU's meter against allocations of known size; what it must not miss is what FSDP2 does behind tensors' backs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from galvatron.measure.rehearsal import memory
from galvatron.measure.rehearsal.memory import CpuMeter

KIB = 1024


def _tensor(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_it_counts_from_where_it_starts() -> None:
    older = _tensor(64)
    with CpuMeter() as meter:
        kept = _tensor(100)
        del older  # no part of what is measured
        with meter.phase("one"):
            first = _tensor(30)
            second = _tensor(20)
            del first
            third = _tensor(25)
        with meter.phase("two"):
            del second
    assert (meter.phases["one"].start, meter.phases["one"].peak) == (100 * KIB, 150 * KIB)
    assert (meter.phases["two"].start, meter.phases["two"].peak) == (145 * KIB, 145 * KIB)
    assert kept.numel() + third.numel() == 125 * KIB


def test_storages_that_are_emptied_and_filled_again_count() -> None:
    with CpuMeter() as meter:
        tensor = _tensor(50)
        with meter.phase("empty"):
            tensor.untyped_storage().resize_(0)
            other = _tensor(10)
        with meter.phase("full"):
            tensor.untyped_storage().resize_(50 * KIB)
    assert meter.phases["empty"].start == 50 * KIB
    assert meter.phases["full"].start == other.numel() == 10 * KIB
    assert meter.phases["full"].peak == 60 * KIB


def test_views_do_not_count_and_backward_does() -> None:
    weight = torch.zeros(1024, 256, requires_grad=True)
    with CpuMeter() as meter, meter.phase("pass"):
        rows = torch.ones(16, 1024)
        product = rows[:8] @ weight
        torch.autograd.backward(product.sum())
    used, gradient = 16 * 1024 * 4 + 8 * 256 * 4, 1024 * 256 * 4
    assert used + gradient <= meter.phases["pass"].peak <= used + gradient + 8 * 256 * 4 + KIB


def test_one_meter_after_another_starts_at_nothing() -> None:
    with CpuMeter() as first:
        kept = _tensor(40)
    with CpuMeter() as second:
        del kept
        with second.phase("alone"):
            tensor = _tensor(5)
    assert first.phases == {}
    assert second.phases["alone"].peak == tensor.numel() == 5 * KIB


def test_what_raises_in_it_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="inner"), CpuMeter():
        raise ValueError("inner")


def test_a_phase_that_the_profiler_lost_is_found_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "record_function", nullcontext)
    with CpuMeter() as meter:
        kept = _tensor(100)
        with meter.phase("work"):
            _tensor(200)
    assert meter.phases["work"].start == kept.numel()
    assert meter.phases["work"].peak == 300 * KIB
