"""Memory of a loss without its logits, by hand: what is alive beside what stays for backward."""

from __future__ import annotations

import pytest

from galvatron.core.spec import LOSS_CHUNK_CELLS, Precision, Training
from galvatron.families import load_cluster
from galvatron.families.llama.facts import Llama
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_HIDDEN, _WORDS, _TOKENS = 1024, 1 << 18, 2048
_WEIGHT = _HIDDEN * _WORDS


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_what_is_alive_while_chunks_run(precision: Precision, compiled: bool) -> None:
    model = Llama(hidden=_HIDDEN, layers=1, heads=8, inner=1024, vocabulary=_WORDS, tied=False)
    spec = model.spec("wide", Training(precision=precision, sequence_length=_TOKENS, compile=compiled))
    (stage,) = priced(Request(model=spec, cluster=load_cluster("h100:1"), batch=4), [["single", "single", "single+fl"]],
                      micro_batches=2).stages  # fmt: skip
    assert 2 * _TOKENS * _WORDS > LOSS_CHUNK_CELLS, "more than one chunk"
    element = precision.bytes
    # Logits and their gradient; where nothing is compiled, both in fp32 between them.
    cells = LOSS_CHUNK_CELLS * (element + (element if compiled else 8))
    # The sum of the weight's gradient in fp32. What stays of it counts as saved: itself, or a copy in bf16 afterwards.
    during, after = cells + (4 - element) * _WEIGHT, 4 * _WEIGHT if precision is Precision.BF16 else 0
    assert stage.memory.transient == max(during, after)
