"""Numbers on their way from the device."""

from __future__ import annotations

import pytest
import torch

from galvatron.runtime.figures import Figures

_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_CUDA)])
def test_are_those_of_the_time_they_were_sent(device: str) -> None:
    """What is written over them afterwards does not count, and none of them is rounded."""
    first, second = torch.tensor(0.1, dtype=torch.float64, device=device), torch.tensor(2.0, device=device)
    figures = Figures(first, second)
    first.zero_()
    second.zero_()
    assert figures.read() == [0.1, 2.0]
