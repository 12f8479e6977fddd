"""Models in memory that people have changed: what the plan decides is taken off, what would be lost is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from oracle import Case, batches, stock_model
from parity import Held, cluster_of, held, plan_for
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel

import galvatron
from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import Training, schedule_named
from galvatron.families.given import as_stock
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.train.checkpoints.export import export_model

_TP = Case(config=config("llama", vocab_size=64), stages=[["tp2"] * 4], batch=4, steps=1, dtype=torch.float32)
_DROPPING = replace(
    _TP,
    config=config("gpt2", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.1),
    training=Training(dropout=True),
)


def _changed(case: Case, change: str | None) -> Any:
    model: Any = stock_model(case)
    blocks: Any = model.transformer.h if hasattr(model, "transformer") else getattr(model, "model", None)
    blocks = getattr(blocks, "layers", blocks)
    match change:
        case "checkpointing":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        case "compiled layers":
            blocks[0] = torch.compile(blocks[0])
            blocks[1].compile()
        case "compiled":
            model = torch.compile(model)
        case "head bias":
            model.lm_head.bias = nn.Parameter(torch.ones(64))
        case "loss":
            model.loss_function = lambda logits, labels, **_: logits.mean()
        case "forward":
            model.forward = lambda **inputs: None
        case "other projection":
            blocks[0].mlp.gate_proj = nn.Sequential(blocks[0].mlp.gate_proj)
        case "split hook":
            blocks[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
        case "parameter hook":
            model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)
        case "shared weight":
            blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
        case "shared module":
            blocks[1].self_attn = blocks[0].self_attn
        case "shared inside":
            blocks[0].mlp.up_proj.weight = blocks[0].mlp.gate_proj.weight
        case "head of another class":
            model.lm_head.__class__ = _Halved
        case "several modules as head":
            model.lm_head = nn.Sequential(model.lm_head)
        case "method" | "method of the head":
            projection = blocks[0].mlp.up_proj if change == "method" else model.lm_head
            projection.forward = MethodType(_halved, projection)
        case "closure":
            old = blocks[0].mlp.up_proj.forward
            blocks[0].mlp.up_proj.forward = lambda hidden: 0.5 * old(hidden)
        case "largest norm":
            model.model.embed_tokens.max_norm = 0.3
        case "frequency":
            model.model.embed_tokens.scale_grad_by_freq = True
        case "backbone hook" | "root hook":
            (model if change == "root hook" else model.model).register_forward_hook(lambda *_: None)
        case "backbone method":
            before = type(model.model).forward
            model.model.forward = MethodType(lambda *args, **named: before(*args, **named), model.model)
        case "backbone class":
            model.model.__class__ = type("Own", (type(model.model),), {})
        case "region hook":
            blocks[0].mlp.register_full_backward_hook(lambda *_: None)
        case "activation":
            blocks[0].mlp.act_fn = nn.Softmax(-1)
        case "other activation":
            blocks[0].mlp.act_fn = nn.GELU()
        case "last norm":
            model.model.norm.__class__ = type("Own", (type(model.model.norm),), {})
        case "hook on an activation":
            blocks[0].mlp.act_fn.register_forward_hook(lambda *_: None)
        case "norm":
            blocks[0].input_layernorm.__class__ = type("Own", (type(blocks[0].input_layernorm),), {})
            blocks[0].register_forward_hook(lambda *_: None)
        case "outputs":
            model(input_ids=torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True, output_attentions=True)
        case "table of one stack":
            model.encoder.embed_tokens = nn.Embedding(67, 32)
        case "hook on the common table":
            model.shared.register_forward_hook(lambda *_: None)
        case "configuration":
            model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        case "evaluation":
            model.eval()
        case "part in evaluation":
            model.transformer.eval()
    return model


def _halved(module: Any, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, module.weight) * 0.5


class _Halved(nn.Linear):
    forward = _halved


# What the plan decides


def _first_step(case: Case, plan: galvatron.Plan, batch: dict[str, Tensor], change: str | None) -> list[Held]:
    """On a rank: gradients of one batch."""
    model = galvatron.parallelize(_changed(case, change), plan, dtype=case.dtype, device="cpu")
    model.forward_backward(batch)
    return held(model)


@pytest.mark.parametrize(
    ("case", "change"),
    [(_DROPPING, "checkpointing"), (_TP, "compiled layers"), (_TP, "compiled")],
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
    model = _changed(_TP, "compiled layers")
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
    model = galvatron.parallelize(_changed(case, change), plan, device="cpu")
    try:
        export_model(model, out)
    except InvalidInput as error:
        return str(error)
    return ""


def test_a_compiled_model_is_exported_whole(tmp_path: Path) -> None:
    assert ranks(2).run(_export, _TP, plan_for(_TP), "compiled layers", tmp_path / "out") == ["", ""]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = stock_model(_TP).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, own in loaded.state_dict().items():
        torch.testing.assert_close(own, expected[name], rtol=0, atol=0)


def test_a_weight_that_the_configuration_does_not_have_is_not_exported(tmp_path: Path) -> None:
    for said in ranks(2).run(_export, _TP, plan_for(_TP), "head bias", tmp_path / "out"):
        assert said.startswith("lm_head.bias: has shape [64] in the model that trained, but does not exist in a Llama")


def _parallelize(case: Case, plan: galvatron.Plan, change: str) -> str:
    """On a rank: what is said to the model."""
    own = _squares if change == "given loss" else None
    try:
        galvatron.parallelize(_changed(case, change), plan, device="cpu", loss=own)
    except GalvatronError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("loss", "LlamaForCausalLM: its loss_function is _changed.<locals>.<lambda>, which layers do not call"),
        ("given loss", "loss: given, but the plan was made for '"),
        (
            "forward",
            "model: the forward of LlamaForCausalLM was replaced by _changed.<locals>.<lambda>, which",
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
        ("head of another class", "layer 'head': lm_head is a _Halved, which would see a part of what it sees in one"),
        ("method", "layer 'decoder': block.mlp.up_proj has a forward of its own, which would see a part"),
        ("several modules as head", "layer 'head': lm_head is a Sequential, which would see a part of what it sees"),
        ("backbone hook", "LlamaForCausalLM: model has a hook, which its layers do not call"),
        ("root hook", "LlamaForCausalLM: the model itself has a hook, which its layers do not call"),
        ("backbone method", "LlamaForCausalLM: model has a forward of its own, which its layers do not call"),
        ("backbone class", "LlamaForCausalLM: model is a Own, which its layers do not call"),
        ("region hook", "layer 'decoder': block.mlp has a hook, which would see a part of what it sees in one process"),
        ("activation", "layer 'decoder': block.mlp.act_fn is a Softmax, which would see a part of what it sees"),
        ("hook on an activation", "layer 'decoder': block.mlp.act_fn has a hook, which would see a part of what it"),
        ("closure", "model: the forward of model.layers.0.mlp.up_proj was replaced by _changed.<locals>.<lambda>"),
        ("largest norm", "model: max_norm of model.embed_tokens changes its weight in forward"),
        ("frequency", "model: scale_grad_by_freq of model.embed_tokens counts the rows of a whole batch"),
    ],
)
def test_what_training_would_ignore_is_refused(change: str, expected: str) -> None:
    for said in ranks(2).run(_parallelize, _TP, plan_for(_TP), change):
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
    for said in ranks(2).run(_patched, _TP, plan_for(_TP), kind):
        assert said.startswith(expected)


def _patched(case: Case, plan: galvatron.Plan, kind: Any) -> str:
    before = kind.forward
    kind.forward = lambda self, *args, **named: before(self, *args, **named)
    try:
        return _parallelize(case, plan, "none")
    finally:
        kind.forward = before


def _adapted(case: Case, plan: galvatron.Plan, change: str) -> str:
    """On a rank: what is said to a peft model; "split hook" was there before the adapter."""
    model: Any = get_peft_model(
        _changed(case, change), LoraConfig(target_modules=["q_proj"], lora_alpha=_ALPHA[change])
    )
    projection = model.get_base_model().model.layers[0].self_attn.q_proj
    if change == "adapter hook":
        projection.lora_B["default"].register_forward_hook(lambda *_: None)
    elif change == "adapter class":
        projection.lora_A["default"].__class__ = _Halved
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
        ("adapter class", "layer 'decoder': block.self_attn.q_proj.lora_A.default is a _Halved"),
        ("adapter method", "peft: model.layers.0.self_attn.q_proj has a forward of its own"),
        ("alpha", "model: its adapters have alpha 32, those in the plan 8; plan again"),
    ],
)
def test_adapters_that_people_changed(change: str, expected: str) -> None:
    """What has another alpha would be exported with the plan's."""
    adapted = get_peft_model(_changed(_TP, None), LoraConfig(target_modules=["q_proj"]))
    planned = galvatron.plan(adapted, "rtx4090:2", batch=4, sequence_length=8, precision="fp32", dropout=False)
    request = Request(model=planned.model.spec(), cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    for said in ranks(2).run(_adapted, _TP, priced(request, _TP.stages, micro_batches=1), change):
        assert said.startswith(expected)
        assert bool(said) == bool(expected)


def test_prompts_that_train_are_refused() -> None:
    model = get_peft_model(_changed(_TP, None), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
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
    for said in ranks(2).run(_parallelize, case, plan_for(case), change):
        assert said.startswith(expected)


def test_a_model_with_another_configuration_is_exported_with_its_own(tmp_path: Path) -> None:
    """Its sizes are those of the plan, and it trains as it is."""
    assert ranks(2).run(_export, _TP, plan_for(_TP), "configuration", tmp_path / "out") == ["", ""]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rope_parameters["rope_theta"] == 77.0
    (batch,) = batches(_TP)
    with torch.no_grad():
        theirs, ours = _changed(_TP, "configuration")(**batch).loss, loaded(**batch).loss
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("change", ["backbone class", "root hook", "shared module", "closure", "largest norm"])
def test_a_changed_model_is_refused_when_it_is_planned_for(change: str) -> None:
    """Before any process starts."""
    with pytest.raises(InvalidInput, match=r"which its layers do not call|are one weight|was replaced by|changes its"):
        galvatron.plan(_changed(_TP, change), "rtx4090:2", batch=4, sequence_length=8)
    assert galvatron.plan(_changed(_TP, "outputs"), "rtx4090:2", batch=4, sequence_length=8).batch == 4


@pytest.mark.parametrize("change", ["head of another class", "method of the head", "several modules as head"])
def test_a_head_of_ones_own_is_not_fused_with_the_loss(change: str) -> None:
    case = replace(_TP, stages=[["dp2", "dp2", "dp2", "dp2+fl"]])
    for said in ranks(2).run(_parallelize, case, plan_for(case), change):
        assert "which would not run where projection and loss are fused; remove it, or plan without that" in said


def test_what_accelerate_puts_around_modules_is_named() -> None:
    model = _changed(_TP, None)
    add_hook_to_module(model.model.layers[0], ModelHook())
    with pytest.raises(InvalidInput, match="remove_hook_from_module"):
        as_stock(model)


# What goes where a copy goes


def _losses(case: Case, plan: galvatron.Plan, given: list[dict[str, Tensor]], change: str | None) -> list[float]:
    """On a rank: of some steps, and of one more in training mode."""
    return _trained(galvatron.parallelize(_changed(case, change), plan, dtype=case.dtype, device="cpu"), given)


def _trained(model: Any, given: list[dict[str, Tensor]], *, turns: bool = True) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(given):
        if turns and number == len(given) - 1:
            model.train()
        if isinstance(model, nn.Module):
            losses.append(model(**batch).loss)
            losses[-1].backward()
        else:
            losses.append(model.forward_backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss.detach()) for loss in losses]


@pytest.mark.parametrize("strategy", ["dp2", "sdp2+rc"])
@pytest.mark.parametrize(
    "change", ["method", "method of the head", "head of another class", "several modules as head", "shared inside"]
)
def test_forwards_of_ones_own_run_where_modules_stay_whole(change: str, strategy: str) -> None:
    case = replace(_TP, stages=[[strategy] * 4], steps=3)
    given = batches(case)
    expected = _trained(_changed(case, change), given)
    for found in ranks(2).run(_losses, case, plan_for(case), given, change):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["dp2", "tp2"])
def test_a_model_in_evaluation_mode_does_not_drop_out(strategy: str) -> None:
    """Until it is to: as in PyTorch."""
    case = replace(_DROPPING, stages=[[strategy] * 4], steps=3)
    given = batches(case)
    expected = _trained(_changed(case, "evaluation"), given)
    for found in ranks(2).run(_losses, case, plan_for(case), given, "evaluation"):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
        assert found[2] != pytest.approx(expected[2], rel=1e-5), "other random numbers than one process's"


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "sdp2+rc"])
def test_a_part_in_evaluation_mode_stays_so(strategy: str) -> None:
    """A frozen tower, say, also where the model is put into training mode again."""
    case = replace(_DROPPING, stages=[[strategy] * 4], steps=3)
    given = batches(case)
    expected = _trained(_changed(case, "evaluation"), given, turns=False)
    for found in ranks(2).run(_losses, case, plan_for(case), given, "part in evaluation"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("change", ["other activation", "last norm"])
def test_what_computes_a_part_as_it_computes_all_may_change(change: str) -> None:
    """Activations element by element, and what is beside the head, with TP too."""
    assert ranks(2).run(_parallelize, _TP, plan_for(_TP), change) == ["", ""]


@pytest.mark.parametrize("change", ["split hook", "region hook", "activation", "norm"])
def test_what_is_changed_in_a_module_that_is_not_split_runs(change: str) -> None:
    """Elsewhere hooks and modules are what they were: under DP those of projections too."""
    case = replace(_TP, stages=[["dp2"] * 4])
    assert ranks(2).run(_parallelize, case, plan_for(case), change) == ["", ""]


@pytest.mark.parametrize(("strategy", "expected"), [("tp2", ""), ("tp2+sp", "layer 'decoder': block has a hook")])
def test_what_is_changed_around_regions_sees_all_tokens_or_is_refused(strategy: str, expected: str) -> None:
    case = replace(_TP, stages=[["tp2", strategy, strategy, "tp2"]])
    for said in ranks(2).run(_parallelize, case, plan_for(case), "norm"):
        assert said.startswith(expected)
        assert bool(said) == bool(expected)


def test_the_hooks_with_which_transformers_collects_outputs_are_nobodys() -> None:
    assert ranks(2).run(_parallelize, _TP, plan_for(_TP), "outputs") == ["", ""]


@pytest.mark.parametrize("change", ["backbone hook", "region hook", "activation"])
def test_unknown_families_run_as_they_are_where_nothing_is_split(change: str) -> None:
    """A small copy made from the configuration knows of no change, so that comparing it shows nothing."""
    case = replace(_TP, stages=[["tp2"] * 4])
    spec = galvatron.describe(stock_model(case), batches(case)[0], case.training)
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    for said in ranks(2).run(_parallelize, case, priced(request, case.stages, micro_batches=1), change):
        assert bool(said) == (change != "backbone hook")


# Known families that were described


def _described(case: Case, plan: galvatron.Plan, batch: dict[str, Tensor]) -> tuple[float, str]:
    """On a rank: the loss under a plan for what ``describe`` found, and with a loss of the user's."""
    model = galvatron.parallelize(stock_model(case), plan, device="cpu", check=False)
    squares = galvatron.parallelize(stock_model(case), plan, device="cpu", check=False, loss=_squares)
    return float(model.forward_backward(batch)), f"{float(squares.forward_backward(batch)):.6f}"


def _squares(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = output.logits
    return logits.square().mean((1, 2)).sum() * batch["labels"].shape[1]


def test_a_described_llama_is_run_as_it_was_described() -> None:
    """Its layers are then those of a model without a family, in the plan and on ranks; a loss of the user's is used."""
    (batch,) = batches(_TP)
    model: Any = stock_model(_TP)
    spec = galvatron.describe(model, batch, _TP.training)
    assert spec.family == "generic"
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    plan = priced(request, [["dp2", "tp2", "sdp2", "dp2"]], micro_batches=2)
    with torch.no_grad():
        output = model(**batch)
    squares = float(output.logits.square().mean()) * 8 / 7  # the last token of a sample has no target
    for loss, other in ranks(2).run(_described, _TP, plan, batch):
        assert loss == pytest.approx(float(output.loss), rel=1e-5)
        assert float(other) == pytest.approx(squares, rel=1e-4)


@pytest.mark.parametrize("stages", [[["dp2"] * 4], [["single"] * 2, ["single"] * 2]])
def test_a_described_llama_trains_weights_that_it_shares(stages: list[list[str]]) -> None:
    """Across stages, too."""
    case = replace(_TP, stages=stages, steps=3)
    given = batches(case)
    spec = galvatron.describe(_changed(case, "shared weight"), given[0], case.training)
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    plan = priced(request, stages, micro_batches=2)
    expected = _trained(_changed(case, "shared weight"), given)
    for found in ranks(2).run(_losses, case, plan, given, "shared weight"):
        assert found == pytest.approx(expected, rel=1e-5)


def test_weights_that_blocks_share_are_not_split(caplog: pytest.LogCaptureFixture) -> None:
    (batch,) = batches(_TP)
    spec = galvatron.describe(_changed(_TP, "shared weight"), batch, _TP.training)
    assert all(kind.tensor_parallel is None for kind in spec.kinds)
    assert "its blocks share weights, which TP cannot split" in caplog.text
