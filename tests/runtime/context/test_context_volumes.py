"""What attention over divided sequences sends is what the planner charges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from context_cases import ContextCase
from longer import longer
from oracle import Case, batches, first_weights
from parity import build, plan_for, spec_of
from ranks import ranks
from small_models import config
from torch import Tensor
from traffic import one_by_one

import galvatron
from galvatron.core.spec import Kind, Strategy
from galvatron.runtime import collectives


@dataclass
class _Sent:
    """Bytes that a rank sent: of each all-to-all, and in each pass to the next rank."""

    exchanged: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)


@contextmanager
def _noted() -> Iterator[_Sent]:
    """Below operators of ours, inside of which torch's dispatch modes see nothing."""
    sent = _Sent()
    all_to_all, batch = collectives.all_to_all, dist.batch_isend_irecv

    def exchange(tensor: Tensor, *rest: Any) -> Any:
        sent.exchanged.append(tensor.nbytes)
        return all_to_all(tensor, *rest)

    def send(operations: Any) -> Any:
        sent.passed.append(sum(each.tensor.nbytes for each in operations if each.op is dist.isend))
        return batch(operations)

    with patch.object(collectives, "all_to_all", exchange), patch.object(dist, "batch_isend_irecv", send):
        yield sent


def _layers(case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]) -> list[tuple[_Sent, _Sent]]:
    """On a rank: what each layer sends in forward and in backward, run by itself."""
    return one_by_one(build(case, plan, folder), batch, _noted)


@pytest.mark.parametrize(
    ("first", "second"),
    [("ring4", "ring2-ulysses2+rc"), ("ulysses4", "ulysses2-tp2+ra"), longer("ring2-tp2+rc", "dp2-ring2+ra")],
)
def test_exchanges_are_as_large_and_as_many_as_priced(first: str, second: str) -> None:
    """Of keys and values of a rank's tokens r − 1 passes forward, and 2r − 1 backward with their gradients; queries,
    keys, values and the result once there and once back. Recompute repeats forward, `+ra` does not. Layers beside
    attention send nothing."""
    plain = "ulysses4"
    case = ContextCase(
        config=config("llama", use_cache=False, num_key_value_heads=4 if "+ra" not in second else 8),
        stages=[[plain, first, second, plain]],
        batch=4,
        tokens=32,
        dtype=torch.float32,
        steps=1,
    )
    found = ranks(4).run(_layers, case, plan_for(case), first_weights(case), batches(case)[0])
    layers = spec_of(case).layers
    for own in found:
        for number, text in ((0, plain), (1, first), (2, second), (3, plain)):
            context, strategy = layers[number].context, Strategy.parse(text)
            assert context is not None
            part = case.batch // strategy.data_degree, strategy.context_degree * strategy.degree(Kind.TP)
            query, key_value = (part[0] * size // part[1] for size in (context.query_bytes, context.key_value_bytes))
            ring, exchanges = strategy.degree(Kind.RING), strategy.degree(Kind.ULYSSES) > 1 and query > 0
            there = [query, key_value // 2, key_value // 2, query] if exchanges else []
            again = int(strategy.recompute)
            passes = ring - 1 if query else 0
            forward, backward = own[number]
            assert sorted(forward.exchanged) == sorted(there), text
            assert sorted(backward.exchanged) == sorted(there * (1 + again)), text
            assert forward.passed == [key_value] * passes, text
            assert backward.passed == [key_value] * (passes * (2 + again) + (passes > 0)), text
