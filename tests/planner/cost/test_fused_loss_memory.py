"""Memory of a loss without its logits, by hand: what is alive beside what stays for backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron.core.spec import LOSS_CHUNK_CELLS, Cluster, Precision, Training
from galvatron.families import load_cluster
from galvatron.families.llama.facts import Llama
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_HIDDEN, _WORDS, _TOKENS = 1024, 1 << 18, 2048


def _transient(words: int, precision: Precision, compiled: bool, cluster: Cluster) -> int:
    model = Llama(hidden=_HIDDEN, layers=1, heads=8, inner=1024, vocabulary=words, tied=False)
    spec = model.spec("wide", Training(precision=precision, sequence_length=_TOKENS, compile=compiled))
    stages = [["single", "single", "single+fl"]]
    (stage,) = priced(Request(model=spec, cluster=cluster, batch=4), stages, micro_batches=2).stages
    assert 2 * _TOKENS * words > LOSS_CHUNK_CELLS, "more than one chunk"
    return stage.memory.transient


@pytest.mark.parametrize("more", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_what_is_alive_while_chunks_run(precision: Precision, compiled: bool, more: int) -> None:
    element, weight = precision.bytes, _HIDDEN * (_WORDS + more)
    # Compiled, logits and their gradient. Else one of both in fp32, and powers of it.
    uncompiled = (4 if precision is Precision.FP32 else element + 4) + 4
    cells = LOSS_CHUNK_CELLS * (2 * element if compiled else uncompiled)
    # The sum of the weight's gradient in fp32. What stays of it counts as saved: itself, or a copy in bf16 afterwards.
    # Of an odd number of words there is a copy of the weight, which is filled up.
    during = cells + (4 - element) * weight + more * element * weight
    after = 4 * weight if precision is Precision.BF16 else 0
    gpu = load_cluster("h100:1")
    assert _transient(_WORDS + more, precision, compiled, gpu) == max(during, after)
    elsewhere = max(during - more * element * weight, after)  # where nobody wants rows to be aligned
    assert _transient(_WORDS + more, precision, compiled, replace(gpu, fragmentation=0.0)) == elsewhere
