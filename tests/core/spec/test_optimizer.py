"""What is said of each optimizer, against PyTorch's own: the bytes it keeps, and the class that trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ADAMW, OPTIMIZERS, SGD, OptimizerSpec, optimizer_named
from galvatron.runtime.optimizers import has_fused, torch_class
from galvatron.train.settings import Settings

_PARAMETERS = 1000


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.name)
def test_it_keeps_as_many_bytes_as_priced(spec: OptimizerSpec) -> None:
    """As the trainer makes it; counters of a few bytes a tensor aside."""
    weight = nn.Parameter(torch.ones(_PARAMETERS))
    options = Settings().optimizer_options(spec.name)
    optimizer = torch_class(spec)([weight], lr=1e-3, weight_decay=0.01, fused=spec.fused, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor) and value.dim()]
    assert sum(value.nbytes for value in kept) == spec.state_bytes * _PARAMETERS
    assert spec.bytes_per_parameter * _PARAMETERS == weight.nbytes + weight.grad.nbytes + sum(v.nbytes for v in kept)
    # A step reads all of it, and writes all but the gradient.
    assert spec.traffic_bytes == 2 * spec.bytes_per_parameter - 4


def test_which_have_fused_kernels() -> None:
    assert all(has_fused(kind) for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))
    assert not has_fused(torch.optim.RMSprop)


def test_names_are_those_of_plan_files() -> None:
    assert [optimizer_named(name) for name in ("adamw", "sgd")] == [ADAMW, SGD]
    with pytest.raises(InvalidInput, match="optimizer: 'lion' is unknown; choose one of adamw, adamw-bf16, sgd"):
        optimizer_named("lion")
