"""In bf16 with fp32 masters a plan is as close to fp32 training as a single process in bf16 is."""

from __future__ import annotations

import pytest
import torch
from bf16_oracle import excess
from longer import longer
from oracle import Case, batches, first_weights
from parity import plan_for, train
from ranks import ranks
from small_models import config

_PLANS = {
    "bert": [["tp2-dp2", "sdp4", "dp2-tp2+rc", "dp4+zero2"]],
    "gpt2": [["tp2", "sdp2"], ["tp2+sp+rc", "dp2"]],
    "llama": [["dp4+zero2", "tp4+sp", "tp4", "dp2-sdp2"]],
    "t5": [["tp2", "sdp2", "dp2", "tp2"], ["dp2", "sdp2+rc", "tp2"]],
    "vit": [["single"], ["single"], ["single"], ["single"]],
}


@pytest.mark.parametrize("family", ["bert", longer("gpt2"), longer("llama"), longer("t5"), longer("vit")])
def test_bf16(family: str) -> None:
    case = Case(config=config(family), stages=_PLANS[family], micro_batches=2, dtype=torch.bfloat16)
    found = ranks(4).run(train, case, plan_for(case), first_weights(case), batches(case))
    assert excess(case, found) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("padding", [False, True])
def test_divided_sequences(family: str, padding: bool) -> None:
    """Blocks of a ring are merged in fp32, so that a ring rounds no more than one attention does."""
    stages = [["ring4+zero3", "ring2-ulysses2+rs", "tp2-ring2", "ulysses2-tp2"]]
    case = Case(config=config(family), stages=stages, micro_batches=2, dtype=torch.bfloat16, padding=padding)
    found = ranks(4).run(train, case, plan_for(case), first_weights(case), batches(case))
    assert excess(case, found) is None
