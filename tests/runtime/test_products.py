"""TF32: set while a model computes, restored afterwards, refused where there is none."""

from __future__ import annotations

import pytest
import torch

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision
from galvatron.runtime.products import check_tf32, products, tf32_of


@pytest.mark.parametrize("before", ["highest", "high"])
@pytest.mark.parametrize(
    ("precision", "meanwhile"), [(Precision.TF32, "high"), (Precision.FP32, "highest"), (Precision.BF16, None)]
)
def test_products_are_as_planned_meanwhile_and_as_before_afterwards(
    before: str, precision: Precision, meanwhile: str | None
) -> None:
    torch.set_float32_matmul_precision(before)
    try:
        with pytest.raises(ZeroDivisionError):
            _fail_with(precision, meanwhile or before)
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def _fail_with(precision: Precision, expected: str) -> None:
    with products(tf32=tf32_of(precision)):
        assert torch.get_float32_matmul_precision() == expected
        _ = 1 / 0


def test_a_processor_has_none() -> None:
    with pytest.raises(InvalidInput, match="tf32 is planned, but device 'cpu' has no TF32"):
        check_tf32(Precision.TF32, torch.device("cpu"))
    for precision in (Precision.FP32, Precision.BF16):
        check_tf32(precision, torch.device("cpu"))
