"""Grades of recompute, and offload: training equals the stock model in one process."""

from __future__ import annotations

import pytest
from oracle import Case
from parity import check
from small_models import config

GRADES = ("rs", "ra", "host")


def _case(family: str, *stages: list[str], **options: object) -> Case:
    changes = {"n_layer" if family == "gpt2" else "num_hidden_layers": sum(map(len, stages)) - 2}
    return Case(config=config(family, **changes), stages=list(stages), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_equals_one_process(family: str, grade: str) -> None:
    """DP, SDP, TP, TP with sequence parallelism; and a pipeline."""
    check(_case(family, ["dp2", f"dp2+{grade}", f"sdp2+{grade}", f"tp2+{grade}", f"tp2+sp+{grade}", "dp2"], clip=0.5))
    check(_case(family, ["single", f"single+{grade}"], [f"single+{grade}", "single"], micro_batches=4))
