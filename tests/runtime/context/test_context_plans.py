"""Plans that divide sequences train as the stock model does in one process: losses, gradients, and parameters after
AdamW, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights, single_process
from parity import difference, plan_for, train
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron
from galvatron.core.spec import Strategy
from galvatron.planner.plan.record import PlannedLayer

_EIGHT = {"num_key_value_heads": 8}


@dataclass(frozen=True, kw_only=True)
class ContextCase(Case):
    """A case with longer samples."""

    tokens: int = 24
    documents: bool = False
    """Samples are several documents each, of which positions start anew."""
    batch: int = 4
    steps: int = 2
    clip: float | None = 0.5

    @property
    def length(self) -> int | None:
        return self.tokens

    def complete(self, batch: dict[str, Tensor], generator: torch.Generator) -> None:
        super().complete(batch, generator)
        if self.documents:
            starts = torch.rand(batch["input_ids"].shape, generator=generator) < 0.2
            starts[:, 0] = True
            places = torch.arange(self.tokens).expand(starts.shape)
            batch["position_ids"] = places - torch.where(starts, places, 0).cummax(1).values


def plan_of(case: Case) -> galvatron.Plan:
    """The case's plan; what it would cost is that of DP, which the runtime does not read."""
    sizes = [Strategy.parse(stage[0]).devices for stage in case.stages]
    alike = [
        [f"dp{size}" if size > 1 else "single"] * len(stage) for size, stage in zip(sizes, case.stages, strict=True)
    ]
    count = case.micro_batches
    stand_in = plan_for(replace(case, stages=alike, batch=sizes[0] * count))

    def layer(own: PlannedLayer, strategy: str) -> PlannedLayer:
        return replace(own, strategy=strategy)

    stages = tuple(
        replace(stage, layers=tuple(map(layer, stage.layers, strategies)))
        for stage, strategies in zip(stand_in.stages, case.stages, strict=True)
    )
    return replace(stand_in, stages=stages, batch=case.batch)


def found_difference(case: Case) -> str | None:
    found = ranks(case.devices).run(train, case, plan_of(case), first_weights(case), batches(case))
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
    made = []
    for alone in _ALONE:
        for name, text in _WITH.items():
            strategy = text.format(alone)
            devices = Strategy.parse(strategy).devices * (2 if name == "pp" else 1)
            if devices in (2, 4, 6, 8):
                made.append(longer(strategy, name == "pp"))
    return made


@pytest.mark.parametrize("inputs", [{}, {"padding": True}, {"documents": True}], ids=["plain", "padding", "documents"])
@pytest.mark.parametrize(("strategy", "cut"), [("ring3-dp2", False), *_cases()])
def test_each_kind(strategy: str, cut: bool, inputs: dict[str, Any]) -> None:
    """Each way to divide sequences with each other parallelism; GQA of two heads for each of keys."""
    first = strategy.removesuffix("+sp")  # which an embedding cannot
    stages = [[first, strategy], [strategy] * 2] if cut else [[first, *[strategy] * 3]]
    tokens = 48 if "ring3" in strategy else 32
    _check(
        stages, changes={**_EIGHT, "num_attention_heads": 16}, tokens=tokens, micro_batches=2 if cut else 1, **inputs
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
@pytest.mark.parametrize("padding", [True, longer(False)])
def test_other_families(family: str, stages: list[list[str]], padding: bool) -> None:
    """Encoders, of which every token sees all; learned positions."""
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    _check(stages, family, {name: 64}, padding=padding)


@pytest.mark.parametrize("grade", ["rs", longer("ra"), longer("rc"), longer("host")])
def test_recomputed_in_part(grade: str) -> None:
    """What is kept of attention over a ring, and of exchanges, is what backward needs."""
    _check([["dp2", f"ring2+{grade}", f"ulysses2+{grade}", "ring2"]])
