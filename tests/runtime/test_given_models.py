"""Models in memory that people have changed: what the plan decides is taken off, what would be lost is refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from changing import DROPPING, TP, Halved, changed, refusal
from oracle import Case, batches, stock_model
from parity import Held, cluster_of, held, plan_for
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from ranks import ranks
from small_models import config
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel

import galvatron
from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import schedule_named
from galvatron.families.given import as_stock
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.train.checkpoints.export import export_model

# What the plan decides


def _first_step(case: Case, plan: galvatron.Plan, batch: dict[str, Tensor], change: str | None) -> list[Held]:
    """On a rank: gradients of one batch."""
    model = galvatron.parallelize(changed(case, change), plan, dtype=case.dtype, device="cpu")
    model.forward_backward(batch)
    return held(model)


@pytest.mark.parametrize(
    ("case", "change"),
    [(DROPPING, "checkpointing"), (TP, "compiled layers"), (TP, "compiled")],
)
def test_recompute_and_compiling_are_the_plans_affair(case: Case, change: str) -> None:
    """With TP and dropout, transformers' own recompute would draw other numbers than its forward did."""
    (batch,) = batches(case)
    plain = ranks(2).run(_first_step, case, plan_for(case), batch, None)
    changed = ranks(2).run(_first_step, case, plan_for(case), batch, change)
    for ours, theirs in zip(changed, plain, strict=True):
        assert [own.name for own in ours] == [own.name for own in theirs]
        assert all(torch.equal(own.gradient, other.gradient) for own, other in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_users_model_is_left_as_it_is() -> None:
    model = changed(TP, "compiled layers")
    model.gradient_checkpointing_enable()
    names = [name for name, _ in model.named_parameters()]
    stock: Any = as_stock(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.model.layers[1].gradient_checkpointing
    assert not stock.model.layers[1].gradient_checkpointing
    assert stock.model.layers[0].mlp.up_proj.weight is model.model.layers[0]._orig_mod.mlp.up_proj.weight
    assert as_stock(stock) is stock


# What would be lost


def _export(case: Case, plan: galvatron.Plan, change: str, out: Path) -> str:
    """On a rank: what exporting says."""
    model = galvatron.parallelize(changed(case, change), plan, device="cpu")
    try:
        export_model(model, out)
    except InvalidInput as error:
        return str(error)
    return ""


def test_a_compiled_model_is_exported_whole(tmp_path: Path) -> None:
    assert ranks(2).run(_export, TP, plan_for(TP), "compiled layers", tmp_path / "out") == ["", ""]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = stock_model(TP).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, own in loaded.state_dict().items():
        torch.testing.assert_close(own, expected[name], rtol=0, atol=0)


def test_a_weight_that_the_configuration_does_not_have_is_not_exported(tmp_path: Path) -> None:
    for said in ranks(2).run(_export, TP, plan_for(TP), "head bias", tmp_path / "out"):
        assert said.startswith("lm_head.bias: has shape [64] in the model that trained, but does not exist in a Llama")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("loss", "LlamaForCausalLM: its loss_function is changed.<locals>.<lambda>, which layers do not call"),
        ("given loss", "loss: given, but the plan was made for '"),
        (
            "forward",
            "model: the forward of LlamaForCausalLM was replaced by changed.<locals>.<lambda>, which",
        ),
        ("other projection", "LlamaForCausalLM: model.layers.0 is not as its class made it (its plan in transformers"),
        ("split hook", "layer 'decoder': block.self_attn.q_proj has a hook, which would see a part of what it"),
        ("parameter hook", "model: its parameter model.norm.weight has a hook, which would not run"),
        (
            "shared weight",
            "LlamaForCausalLM: model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight",
        ),
        ("shared module", "LlamaForCausalLM: model.layers.0.self_attn.q_proj.weight and model.layers.1.self_attn"),
        ("shared inside", "layer 'decoder': block.mlp.up_proj.weight is the weight of another of its modules, too"),
        ("head of another class", "layer 'head': lm_head is a Halved, which would see a part of what it sees in one"),
        ("method", "layer 'decoder': block.mlp.up_proj has a forward of its own, which would see a part"),
        ("several modules as head", "layer 'head': lm_head is a Sequential, which would see a part of what it sees"),
        ("backbone hook", "LlamaForCausalLM: model has a hook, which its layers do not call"),
        ("root hook", "LlamaForCausalLM: the model itself has a hook, which its layers do not call"),
        ("backbone method", "LlamaForCausalLM: model has a forward of its own, which its layers do not call"),
        ("root method", "LlamaForCausalLM: the model itself has a forward of its own, which its layers do not call"),
        ("backbone class", "LlamaForCausalLM: model is a Own, which its layers do not call"),
        ("region hook", "layer 'decoder': block.mlp has a hook, which would see a part of what it sees in one process"),
        ("activation", "layer 'decoder': block.mlp.act_fn is a Softmax, which would see a part of what it sees"),
        ("hook on an activation", "layer 'decoder': block.mlp.act_fn has a hook, which would see a part of what it"),
        ("closure", "model: the forward of model.layers.0.mlp.up_proj was replaced by changed.<locals>.<lambda>"),
        ("largest norm", "model: max_norm of model.embed_tokens changes its weight in forward"),
        ("frequency", "model: scale_grad_by_freq of model.embed_tokens counts the rows of a whole batch"),
    ],
)
def test_what_training_would_ignore_is_refused(change: str, expected: str) -> None:
    for said in ranks(2).run(refusal, TP, plan_for(TP), change):
        assert said.startswith(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            LlamaMLP,
            "layer 'decoder': block.mlp has a forward of its own, which would see a part of what it sees in one",
        ),
        (LlamaModel, "LlamaForCausalLM: model has a forward of its own, which its layers do not call"),
        (LlamaForCausalLM, "LlamaForCausalLM: the model itself has a forward of its own, which its layers do not call"),
    ],
)
def test_a_class_whose_forward_was_replaced(kind: Any, expected: str) -> None:
    """For all of its modules, as is often done."""
    for said in ranks(2).run(_patched, TP, plan_for(TP), kind):
        assert said.startswith(expected)


def _patched(case: Case, plan: galvatron.Plan, kind: Any) -> str:
    before = kind.forward
    kind.forward = lambda self, *args, **named: before(self, *args, **named)
    try:
        return refusal(case, plan, "none")
    finally:
        kind.forward = before


def _adapted(case: Case, plan: galvatron.Plan, change: str) -> str:
    """On a rank: what is said to a peft model; "split hook" was there before the adapter."""
    model: Any = get_peft_model(changed(case, change), LoraConfig(target_modules=["q_proj"], lora_alpha=_ALPHA[change]))
    projection = model.get_base_model().model.layers[0].self_attn.q_proj
    if change == "adapter hook":
        projection.lora_B["default"].register_forward_hook(lambda *_: None)
    elif change == "adapter class":
        projection.lora_A["default"].__class__ = Halved
    elif change == "adapter method":
        projection.forward = MethodType(type(projection).forward, projection)
    try:
        galvatron.parallelize(model, plan, device="cpu")
    except GalvatronError as error:
        return str(error)
    return ""


_ALPHA = defaultdict(lambda: 8, alpha=32)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("none", ""),
        ("split hook", "layer 'decoder': block.self_attn.q_proj.base_layer has a hook"),
        ("adapter hook", "layer 'decoder': block.self_attn.q_proj.lora_B.default has a hook"),
        ("adapter class", "layer 'decoder': block.self_attn.q_proj.lora_A.default is a Halved"),
        ("adapter method", "peft: model.layers.0.self_attn.q_proj has a forward of its own"),
        ("alpha", "model: its adapters have alpha 32, those in the plan 8; plan again"),
    ],
)
def test_adapters_that_peoplechanged(change: str, expected: str) -> None:
    """What has another alpha would be exported with the plan's."""
    adapted = get_peft_model(changed(TP, None), LoraConfig(target_modules=["q_proj"]))
    planned = galvatron.plan(adapted, "rtx4090:2", batch=4, sequence_length=8, precision="fp32", dropout=False)
    request = Request(model=planned.model.spec(), cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    for said in ranks(2).run(_adapted, TP, priced(request, TP.stages, micro_batches=1), change):
        assert said.startswith(expected)
        assert bool(said) == bool(expected)


def test_prompts_that_train_are_refused() -> None:
    model = get_peft_model(changed(TP, None), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(InvalidInput, match="the model is trained by PROMPT_TUNING; only LoRA can be run"):
        galvatron.plan(model, "rtx4090:2", batch=4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("table of one stack", "T5ForConditionalGeneration: encoder.embed_tokens.weight is in none of its layers"),
        ("hook on the common table", "T5ForConditionalGeneration: shared has a hook, which its layers do not call"),
    ],
)
def test_tables_of_two_stacks(change: str, expected: str) -> None:
    """The stock stacks look up in modules of their own, of which the weight is one."""
    case = Case(config=config("t5"), stages=[["dp2"] * 7], batch=4, steps=1)
    for said in ranks(2).run(refusal, case, plan_for(case), change):
        assert said.startswith(expected)


def test_a_model_with_another_configuration_is_exported_with_its_own(tmp_path: Path) -> None:
    """Its sizes are those of the plan, and it trains as it is."""
    assert ranks(2).run(_export, TP, plan_for(TP), "configuration", tmp_path / "out") == ["", ""]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rope_parameters["rope_theta"] == 77.0
    (batch,) = batches(TP)
    with torch.no_grad():
        theirs, ours = changed(TP, "configuration")(**batch).loss, loaded(**batch).loss
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("change", ["backbone class", "root hook", "shared module", "closure", "largest norm"])
def test_a_changed_model_is_refused_when_it_is_planned_for(change: str) -> None:
    """Before any process starts."""
    with pytest.raises(InvalidInput, match=r"which its layers do not call|are one weight|was replaced by|changes its"):
        galvatron.plan(changed(TP, change), "rtx4090:2", batch=4, sequence_length=8)
    assert galvatron.plan(changed(TP, "outputs"), "rtx4090:2", batch=4, sequence_length=8).batch == 4


@pytest.mark.parametrize("change", ["head of another class", "method of the head", "several modules as head"])
def test_a_head_of_ones_own_is_not_fused_with_the_loss(change: str) -> None:
    case = replace(TP, stages=[["dp2", "dp2", "dp2", "dp2+fl"]])
    for said in ranks(2).run(refusal, case, plan_for(case), change):
        assert "which would not run where projection and loss are fused; remove it, or plan without that" in said


def test_what_accelerate_puts_around_modules_is_named() -> None:
    model = changed(TP, None)
    add_hook_to_module(model.model.layers[0], ModelHook())
    with pytest.raises(InvalidInput, match="remove_hook_from_module"):
        as_stock(model)
