"""A rank's device, made ready: CUDA is a stand-in here."""

from __future__ import annotations

import os

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
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("gpu")
def test_segments_may_grow() -> None:
    assert claim_device(3) == torch.device("cuda", 3)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_tells_the_allocator_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    claim_device(0)
    told = {key: os.environ[key] for key in os.environ if key.endswith("ALLOC_CONF")}
    assert told == {name: "max_split_size_mb:128"}


def test_a_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(os.environ)
    assert claim_device(0) == torch.device("cpu")
    assert dict(os.environ) == before
