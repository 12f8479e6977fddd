"""Plans that divide sequences train as the stock model does in one process: losses, gradients, and parameters after
AdamW, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from context_cases import ContextCase
from longer import longer
from oracle import Case, batches, first_weights, single_process
from parity import difference, plan_for, train
from ranks import ranks
from small_models import config
from torch import Tensor

from galvatron.core.spec import Kind, Layout, Strategy
from galvatron.families import context
from galvatron.runtime import batches as batches_module
from galvatron.runtime import build
from galvatron.runtime.context import ring
from galvatron.runtime.layout.tokens import TokenOrder
from galvatron.runtime.pipeline import transfer

_EIGHT = {"num_key_value_heads": 8}


def found_difference(case: Case) -> str | None:
    found = ranks(case.devices).run(train, case, plan_for(case), first_weights(case), batches(case))
    return difference(case, found, single_process(case))


def _check(
    stages: list[list[str]], family: str = "llama", changes: dict[str, Any] | None = None, **settings: Any
) -> None:
    chosen = config(family, use_cache=False, **(changes or {}))  # with a cache stock models see no documents
    case = ContextCase(config=chosen, stages=stages, **settings)
    assert found_difference(case) is None


_MIXED = {
    "slices of each kind": [["dp2-ring2", "ring2-tp2+sp", "ulysses2-tp2", "sdp2-ulysses2"]],
    "sharded over the context": [["ring4+zero3", "ring2-ulysses2+zero2", "dp2-ring2+zero2", "sdp2-ring2"]],
    "beside whole sequences": [["dp4", "ring2-ulysses2+rc", "tp4+sp", "tp2-ulysses2+sp"]],
    "orders over the links": [["ulysses2-ring2", "tp2-ring2+sp", "ring2-ulysses2", "ulysses2-tp2+sp"]],
    "two stages": [["ring2", "ulysses2"], ["tp2+sp", "ring2+fl"]],
    "two stages, other slices": [["ring2-ulysses2", "sdp4"], ["ulysses4", "ring4"]],
}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("slices of each kind", {"padding": True}),
        ("sharded over the context", {"documents": True}),
        ("beside whole sequences", {"padding": True}),
        longer("orders over the links", {"documents": True}),
        ("two stages", {"documents": True}),
        longer("two stages, other slices", {"padding": True}),
        *(longer(name, {}) for name in _MIXED),
    ],
)
def test_mixed_plans(name: str, inputs: dict[str, Any]) -> None:
    _check(_MIXED[name], micro_batches=2, batch=8, **inputs)


_ALONE = ("ulysses2", "ulysses4", "ring2", "ring3", "ring4", "ring2-ulysses2", "ulysses2-ring2", "ring3-ulysses2")
_WITH = {
    "alone": "{}",
    "tp": "{}-tp2",
    "tp outside": "tp2-{}",
    "sp": "{}-tp2+sp",
    "sdp": "sdp2-{}",
    "dp": "dp2-{}",
    "pp": "{}",
}


def _cases() -> list[Any]:
    """All with plain samples, with packed documents, and with padding."""
    made = []
    for alone in _ALONE:
        for name, text in _WITH.items():
            strategy, cut = text.format(alone), name == "pp"
            if Strategy.parse(strategy).devices * (2 if cut else 1) not in (2, 4, 6, 8):
                continue
            made += [longer(strategy, cut, inputs) for inputs in ("", "documents", "padding")]
    return made


@pytest.mark.parametrize(("strategy", "cut", "inputs"), [("ring3-dp2", False, "documents"), *_cases()])
def test_each_kind(strategy: str, cut: bool, inputs: str) -> None:
    """Each way to divide sequences with each other parallelism; GQA of two heads for each of keys."""
    first = strategy.removesuffix("+sp")  # which an embedding cannot
    stages = [[first, strategy], [strategy] * 2] if cut else [[first, *[strategy] * 3]]
    tokens = 48 if "ring3" in strategy else 32
    _check(
        stages,
        changes={**_EIGHT, "num_attention_heads": 16},
        tokens=tokens,
        micro_batches=2 if cut else 1,
        **({inputs: True} if inputs else {}),
    )


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("bert", [["ring2", "ulysses2", "ring2", "ulysses2"]]),
        longer("gpt2", [["ring2", "ulysses2", "ring2", "ulysses2"]]),
        longer("bert", [["ring2-tp2", "ring2-ulysses2", "ulysses2-tp2+sp", "dp2-ring2"]]),
        longer("gpt2", [["ring2-tp2", "ring2-ulysses2", "ulysses2-tp2+sp", "dp2-ring2"]]),
    ],
)
@pytest.mark.parametrize("inputs", [{"padding": True}, {"documents": True}, longer({})])
def test_other_families(family: str, stages: list[list[str]], inputs: dict[str, Any]) -> None:
    """Encoders, of which every token sees all, wherever positions start anew; learned positions."""
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    _check(stages, family, {name: 64}, **inputs)


@pytest.mark.parametrize("grade", ["rs", longer("ra"), longer("rc")])
def test_recomputed_in_part(grade: str) -> None:
    """What is kept of attention over a ring, and of exchanges, is what backward needs."""
    _check([["dp2", f"ring2+{grade}", f"ulysses2+{grade}", "ring2"]], changes=_EIGHT)


# Deliberate breaks


def _shifted_within(original: Any) -> Any:
    def sliced(batch: Any, tokens: Tensor, groups: tuple[str, str], *, shifts: bool, separates: bool) -> Any:
        """Labels are shifted after they were divided, so that the last target of a chunk is lost."""
        parts, mask = original(batch, tokens, groups, shifts=False, separates=separates)
        if shifts and "labels" in parts:
            parts["shift_labels"] = context.next_tokens(parts.pop("labels"))
        return parts, mask

    return sliced


def _from_zero(original: Any) -> Any:
    def sliced(batch: Any, tokens: Tensor, groups: tuple[str, str], *, shifts: bool, separates: bool) -> Any:
        """Every slice begins at position zero."""
        parts, mask = original(batch, tokens, groups, shifts=shifts, separates=separates)
        if "position_ids" in parts:
            parts["position_ids"] = torch.arange(len(tokens)).expand(parts["position_ids"].shape)
        return parts, mask

    return sliced


def _forgets_ranks(original: Any) -> Any:
    def merge(total: tuple[Tensor, Tensor], tokens: slice, block: tuple[Tensor, Tensor]) -> None:
        """Blocks are added up as if each had seen all keys."""
        total[0][:, :, tokens] += block[0]
        total[1][:, :, tokens] = torch.logaddexp(total[1][:, :, tokens], block[1])

    return merge


def _plain(layout: Layout) -> Layout:
    return replace(layout, zigzag=frozenset())


_BREAKS: dict[str, tuple[Any, str, Any]] = {
    "labels are shifted within slices": (batches_module, "sliced", _shifted_within),
    "slices begin at position zero": (batches_module, "sliced", _from_zero),
    "blocks are merged without their log-sum-exp": (ring, "merge", _forgets_ranks),
    "gradients are not summed over the context": (
        Strategy, "replica_factors", lambda _: property(lambda own: own.factors(Kind.DP)),
    ),
    "the loss counts slices as copies": (
        build, "degree_of", lambda original: lambda factors: original(factors) // 2 or 1,
    ),
    "a change of layout forgets the zig-zag order": (TokenOrder, "joined", lambda _: lambda own, tensor: tensor),
    "stages forget the zig-zag order": (
        transfer, "sequence_pieces", lambda original: lambda layout, *sizes: original(_plain(layout), *sizes),
    ),
}  # fmt: skip
_LEAN = ("labels are shifted within slices", "slices begin at position zero")
"""The third that everybody makes, a missing log-sum-exp, is among the tests of attention."""


def _broken(name: str, *args: Any) -> Any:
    owner, attribute, instead = _BREAKS[name]
    with patch.object(owner, attribute, instead(getattr(owner, attribute))):
        return train(*args)


@pytest.mark.parametrize("name", [own if own in _LEAN else longer(own) for own in _BREAKS])
def test_breaks_show(name: str) -> None:
    """On two ranks: what each test above would find."""
    stages = [["ring2", "ring2"], ["dp2", "ring2"]] if "stages" in name else [["ring2", "dp2", "ring2", "ring2"]]
    case = ContextCase(config=config("llama", use_cache=False), stages=stages, clip=None, steps=1)
    args = (case, plan_for(case), first_weights(case), batches(case))
    found = ranks(case.devices).run(_broken, name, *args)
    assert difference(case, found, single_process(case)) is not None
