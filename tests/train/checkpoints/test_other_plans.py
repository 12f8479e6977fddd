"""What was saved under one plan loads under any other, bit for bit, and training goes on as it would have."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights
from parity import plan_for
from ranks import ranks
from resuming import loaded, saved
from small_models import config

_PLANS: dict[str, list[list[list[str]]]] = {
    "gpt2": [  # fused query, key and value; a tied head
        [["tp8", "sdp2-tp4", "dp2-tp4", "sdp8"]],
        [["sdp4", "tp4", "dp4+zero2", "dp2-sdp2"]],
        [["tp2", "dp2"], ["sdp2", "tp2+sp"]],
        [["single"] * 4],
        [["tp2-sdp2", "sdp2-tp2+sp", "tp4", "dp4"]],
    ],
    "llama": [  # sharded over divided sequences
        [["ring4+zero3", "ring2-ulysses2+zero3", "sdp2-ring2", "dp2-ulysses2+zero2"]],
        [["dp2-tp2", "sdp4", "tp4", "dp4"]],
        [["ring2", "ulysses2+zero2"], ["sdp2", "ring2+zero3"]],
    ],
    "t5": [  # tables that all stages have
        [["tp2", "sdp2"], ["dp2", "tp2", "sdp2", "tp2", "dp2"]],
        [["sdp4", "tp4", "dp2-sdp2", "tp2-dp2", "sdp4", "tp4", "dp4+zero2"]],
    ],
}
"""Each is saved under and loaded under the next."""
_CHANGES = [
    (family, *pair) if number == 2 and family == "gpt2" else longer(family, *pair)
    for family, plans in _PLANS.items()
    for number, pair in enumerate(pairwise(plans))
]
"""Out of a pipeline to fewer devices, where bf16 (below) goes into one; the longer run has all."""


@pytest.mark.parametrize(("family", "first", "second"), _CHANGES)
def test_another_plan_goes_on(family: str, first: list[list[str]], second: list[list[str]], tmp_path: Path) -> None:
    _check(Case(config=config(family), stages=first, micro_batches=2), second, tmp_path, rel=1e-9)


def test_in_bf16_masters_are_saved_as_they_are(tmp_path: Path) -> None:
    case = Case(config=config("gpt2"), stages=[["tp4", "sdp4", "dp4", "dp4+zero2"]], dtype=torch.bfloat16)
    _check(case, [["dp2", "tp2"], ["sdp2", "dp2"]], tmp_path, rel=1e-2)


def _check(case: Case, second: list[list[str]], folder: Path, *, rel: float) -> None:
    """Every parameter and state, gathered without checkpoints on both sides, is the same; so is the next loss, as far
    as sums in another order allow."""
    given = batches(case)
    before = ranks(case.devices).run(saved, case, plan_for(case), first_weights(case), given, folder)
    other = replace(case, stages=second)
    after = ranks(other.devices).run(loaded, other, plan_for(other), given, folder)
    for state in after:
        assert state.tensors.keys() == before[0].tensors.keys()
        for name, tensor in before[0].tensors.items():
            assert torch.equal(state.tensors[name], tensor), name
        assert set(state.scalars.values()) == {len(given) - 1}
        assert state.next_loss == pytest.approx(before[0].next_loss, rel=rel)
        assert state.progress == before[0].progress
