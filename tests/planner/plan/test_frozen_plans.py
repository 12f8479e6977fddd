"""Plans for models of which a part is frozen: what is frozen, and whether the search still finds the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B, Precision, Strategy, Training
from galvatron.core.spec.tuning import Lora
from galvatron.families import load_cluster
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.advice import fits, make_plan, smallest_budget, with_adapters
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import request_for
from galvatron.planner.space import PAPER

_GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def _model() -> Any:
    config: Any = GPT2Config
    kind: Any = GPT2LMHeadModel
    return kind(config(**{key: own for key, own in _GPT2.items() if key != "model_type"}))


def _spec(**training: Any) -> galvatron.ModelSpec:
    return load_any_model(_GPT2, Training(precision=Precision.FP32, sequence_length=32, **training))


def _names(spec: galvatron.ModelSpec) -> list[str]:
    return [layer.name for layer in spec.layers]


def test_kinds_say_what_is_frozen() -> None:
    whole = _spec()
    first = _spec(freeze=("transformer.w?e", "transformer.h.[01]"))
    assert _names(first) == ["embedding+frozen", *["decoder+frozen"] * 2, *["decoder"] * 2, "head+partly"]
    last = _spec(train_only=("transformer.wpe", "transformer.h.0"))
    assert _names(last) == ["embedding+partly", "decoder", *["decoder+passed"] * 3, "head+passed"]
    parts = _spec(freeze=("transformer.h.*.mlp", "transformer.h.2"))
    assert _names(parts) == [
        "embedding",
        "decoder+partly",
        "decoder+partly",
        "decoder+passed",
        "decoder+partly",
        "head",
    ]
    for spec in (first, last, parts):
        assert spec.untuned() == whole
        assert spec.parameters == whole.parameters


@pytest.mark.parametrize(
    "frozen",
    [("transformer.w?e", "transformer.h.[01]"), ("transformer.h.*.mlp",), ("*.bias",), ("lm_head", "*ln_?")],
)
def test_counts_are_those_of_the_stock_model(frozen: tuple[str, ...]) -> None:
    """The head's words are the embedding's: frozen with it, and counted once."""
    spec = _spec(freeze=frozen)
    model = _model()
    training = Training(freeze=frozen)
    from galvatron.families.tuning import freeze

    freeze(model, training)
    assert spec.trained_parameters == sum(own.numel() for own in model.parameters() if own.requires_grad)
    assert spec.trained_parameters < spec.parameters


def test_a_model_in_memory_is_planned_as_it_is_frozen(tmp_path: Path) -> None:
    """From its ``requires_grad``, and the plan's file has it."""
    model = _model()
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    model.transformer.h[1].ln_1.bias.requires_grad_(False)
    plan = galvatron.plan(model, "titan-rtx-8", batch=8)
    assert plan.model.training.freeze == ("transformer.wpe", "transformer.h.0", "transformer.h.1.ln_1.bias")
    plan.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan
    assert galvatron.plan(model, "titan-rtx-8", batch=8).to_json() == plan.to_json()


def test_a_model_of_ones_own_is_described_as_it_is_frozen() -> None:
    model = _model()
    batch = {"input_ids": torch.zeros((2, 16), dtype=torch.long), "labels": torch.zeros((2, 16), dtype=torch.long)}
    whole = galvatron.describe(model, batch)
    model.transformer.h[0].requires_grad_(False)
    spec = galvatron.describe(model, batch)
    assert spec.untuned() == whole
    assert spec.parameters - spec.trained_parameters == sum(own.numel() for own in model.transformer.h[0].parameters())
    assert spec.training.freeze == ("transformer.h.0",)


def test_what_cannot_be_frozen_is_refused() -> None:
    for wrong, said in (("nosuch", "'nosuch' fits no parameter"), ("*", "all parameters of the model are frozen")):
        with pytest.raises(InvalidInput, match=said.replace("*", "[*]")):
            _spec(freeze=(wrong,))
    with pytest.raises(InvalidInput, match="given by its figures"):
        request_for(_spec(), "titan-rtx-8", {"freeze": "transformer.wpe"})
    model = _model().requires_grad_(False)
    with pytest.raises(InvalidInput, match="all of its parameters are frozen"):
        galvatron.plan(model, "titan-rtx-8", batch=8)


@pytest.mark.parametrize("frozen", [("transformer.w?e", "transformer.h.0"), ("lm_head", "transformer.h.1")])
def test_the_search_finds_the_best(frozen: tuple[str, ...]) -> None:
    """Of all plans on two devices, each priced by itself."""
    spec = _spec(freeze=frozen)
    spec = replace(spec, layers=(spec.layers[0], *spec.layers[1:3], spec.layers[-1]))
    base = load_cluster("titan-rtx-8")
    cluster = replace(base, name="two", levels=(replace(base.levels[0], units=2),))
    request = Request(model=spec, cluster=cluster, batch=4, schedule=ONE_F_ONE_B, switches=PAPER)
    found = galvatron.plan(spec, cluster, batch=4, recompute=False, sequence_parallel=False, zero2=False)
    best = float("inf")
    for count, stages in product((1, 2, 4), (1, 2)):
        strategies = ("dp2", "sdp2", "tp2") if stages == 1 else ("single",)
        for chosen in product(strategies, repeat=4):
            if any(4 // count % Strategy.parse(own).data_degree for own in chosen):
                continue
            for cut in (1, 2, 3) if stages == 2 else (4,):
                cuts = [list(chosen[:cut]), list(chosen[cut:])][:stages]
                best = min(best, priced(request, cuts, micro_batches=count).iteration_s)
    assert found.iteration_s == pytest.approx(best, rel=1e-6)


def test_advised_adapters_are_priced_as_the_real_ones() -> None:
    """Counted without the model itself, beside the model with peft's adapters."""
    training = Training(precision=Precision.BF16, sequence_length=2048)
    whole = load_any_model("llama3-8b", training)
    real = load_any_model("llama3-8b", replace(training, lora=Lora(rank=16, alpha=32.0)))
    plans, budgets = [], []
    for model in (with_adapters(whole, 16), real):
        request = Request(model=model, cluster=load_cluster("rtx4090:1x2"))
        least = smallest_budget(request)
        assert least is not None
        assert fits(replace(request, memory_bytes=least[0]))
        assert not fits(replace(request, memory_bytes=least[0] - 1))
        plans.append(make_plan(request).throughput)
        budgets.append(least[0])
    assert plans[0] == pytest.approx(plans[1], rel=0.05)
    assert budgets[0] == pytest.approx(budgets[1], rel=0.05)
