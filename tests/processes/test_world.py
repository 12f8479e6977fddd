"""A rank's device, made ready: CUDA is a stand-in here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from galvatron.processes.world import claim_device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("gpu")
def test_segments_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the allocator has read its environment: here it has before."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    assert claim_device(3) == torch.device("cuda", 3)
    assert told == ["expandable_segments:True"]


_GROWN = """
import torch
from galvatron.processes.world import claim_device
torch.cuda.mem_get_info(0)  # some programs have used the device before
claim_device(0)
held = torch.zeros(1 << 28, device="cuda")
assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_segments_grow_on_a_gpu() -> None:
    subprocess.run([sys.executable, "-c", _GROWN], check=True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_tells_the_allocator_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    claim_device(0)
    assert not told


def test_a_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(os.environ)
    assert claim_device(0) == torch.device("cpu")
    assert dict(os.environ) == before
