"""Modules that train in full beside adapters (peft's ``modules_to_save``): as peft trains, saves and loads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from longer import longer
from oracle import Case, Record, batches, stock_model, trained
from parity import Trained, cluster_of, difference, run
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from ranks import ranks
from safetensors.torch import load_file
from small_models import config
from torch import Tensor

import galvatron
from galvatron import InvalidInput
from galvatron.core.spec import Training
from galvatron.core.spec.tuning import Lora
from galvatron.families.lora import lora_of, without_peft
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.train.checkpoints.adapters import lora_of_plan
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import export, export_model

_CLASSIFIER = {
    "model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
_LLAMA = config("llama", vocab_size=64, tie_word_embeddings=False)


@dataclass(frozen=True, kw_only=True)
class _Saved(Case):
    modules: tuple[str, ...] = ()
    task: str | None = None
    steps: int = 3


def _peft(case: _Saved) -> Any:
    """peft's own model, whose adapters are not zero, and whose saved modules are no longer those of the base."""
    modules: Any = list(case.modules) or None
    options = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules="all-linear",
        exclude_modules=modules,
        modules_to_save=modules,
        task_type=case.task,
    )
    model: Any = get_peft_model(stock_model(case), options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, own in model.named_parameters():
            drawn = torch.randn(own.shape, generator=generator) * 0.1
            if "lora_" in name:
                own.copy_(drawn)
            elif "modules_to_save" in name:
                own.add_(drawn)
    return model


def _alone(case: _Saved) -> Record:
    """One process of peft's, by the names of the stock model."""
    found = trained(case, _peft(case).get_base_model())
    named = [
        {
            name.replace(".modules_to_save.default.", "."): own
            for name, own in tensors.items()
            if ".original_module." not in name
        }
        for tensors in (found.gradients, found.parameters)
    ]
    return Record(found.losses, found.norms, *named)


def _train(case: _Saved, plan: galvatron.Plan, given: Sequence[dict[str, Tensor]]) -> Trained:
    model = galvatron.parallelize(_peft(case), plan, dtype=case.dtype, device="cpu")
    return run(case, model, given)


def _plan(case: _Saved, model: Any) -> galvatron.Plan:
    length = {} if case.length is None else {"sequence_length": case.length}
    plan = galvatron.plan(model, cluster_of(case.devices), batch=8, precision="fp32", compile=False, **length)  # type: ignore[arg-type]
    request = Request(model=plan.model.spec(), cluster=cluster_of(case.devices), batch=case.batch)
    return priced(request, case.stages, micro_batches=case.micro_batches)


@pytest.mark.parametrize(
    "case",
    [
        _Saved(config=config("vit"), stages=[["dp2", "sdp2", "tp2", "dp2"]], modules=("classifier",)),
        _Saved(config=_LLAMA, stages=[["tp2", "tp2", "sdp2", "tp2"]], modules=("embed_tokens", "lm_head")),
        longer(_Saved(config=_LLAMA, stages=[["single"] * 2, ["single"] * 2], modules=("norm", "lm_head"))),
        longer(_Saved(config=_LLAMA, stages=[["dp2+zero2", "dp2", "sdp2+rc", "dp2+fl"]], modules=("lm_head",))),
        longer(
            _Saved(config=_LLAMA, stages=[["tp2", "tp2+sp", "tp2+sp", "tp2"]], modules=("post_attention_layernorm",))
        ),
        longer(
            _Saved(config=_CLASSIFIER, stages=[["sdp2", "tp2", "dp2", "sdp2"]], task="SEQ_CLS", dtype=torch.float32)
        ),
    ],
    ids=lambda case: f"{case.config['model_type']} {case.stages[0][0]} {','.join(case.modules)}",
)
def test_trains_as_peft_does(case: _Saved) -> None:
    case = replace(case, batch=4, micro_batches=2)
    model = _peft(case)
    before = set(model.state_dict())
    found = ranks(2).run(_train, case, _plan(case, model), batches(case))
    assert difference(case, found, _alone(case)) is None
    assert set(model.state_dict()) == before, "planning leaves peft's model as it was"


def _start(plan: galvatron.Plan, folders: list[Path], batch: dict[str, Tensor]) -> float:
    """On a rank: from a folder of weights and one of adapters; written in both forms."""
    weights, adapters, merged, alone = folders
    model = galvatron.parallelize(None, plan, weights=weights, adapters=adapters, device="cpu")
    export_model(model, merged)
    export_model(model, alone, adapters=True)
    checkpoints = Checkpoints(alone.with_name("saved"))
    checkpoints.save(model, model.optimizer(lr=0.1), {}, step=0, wait=True)
    saved = checkpoints.latest()
    if model.rank == 0 and saved is not None:
        export(saved, alone.with_name("from checkpoint"), adapters=True, base=weights)
    return float(model.evaluate(batch))


@pytest.mark.parametrize(
    "case",
    [
        _Saved(config=_CLASSIFIER, stages=[["tp2", "sdp2", "tp2", "dp2"]], task="SEQ_CLS"),
        longer(_Saved(config=_LLAMA, stages=[["tp2", "tp2", "sdp2", "tp2"]], modules=("embed_tokens", "lm_head"))),
    ],
    ids=lambda case: case.config["model_type"],
)
def test_peft_loads_ours_and_we_load_pefts(case: _Saved, tmp_path: Path) -> None:
    case = replace(case, batch=4, dtype=torch.float32)
    theirs, batch = _peft(case).eval(), batches(case)[0]
    theirs.save_pretrained(tmp_path / "adapters")
    stock_model(case).save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    with torch.no_grad():
        expected = float(theirs(**batch).loss)
    folders = [tmp_path / name for name in ("weights", "adapters", "merged", "alone")]
    for loss in ranks(2).run(_start, _plan(case, theirs), folders, batch):
        assert loss == pytest.approx(expected, rel=1e-5)
    ours, saved = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "from checkpoint"))
    assert all(torch.equal(own, saved.pop(name)) for name, own in ours.items())
    assert not saved
    again = PeftModel.from_pretrained(stock_model(case), str(tmp_path / "alone")).eval()
    whole, report = type(stock_model(case)).from_pretrained(  # type: ignore[attr-defined]
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(report.values()), report
    with_base = AutoPeftModelForSequenceClassification if case.task == "SEQ_CLS" else AutoPeftModelForCausalLM
    found = with_base.from_pretrained(str(tmp_path / "from checkpoint")).eval()  # it says itself on which weights
    with torch.no_grad():
        for model in (again, whole.eval(), found):
            assert float(model(**batch).loss) == pytest.approx(expected, rel=1e-5)


_DISTILBERT = {
    "model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"], "vocab_size": 64, "dim": 32,
    "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
_ROBERTA = {
    "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
    "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip


def _train_and_write(plan: galvatron.Plan, weights: Path, out: Path, batch: dict[str, Tensor]) -> float:
    model = galvatron.parallelize(None, plan, weights=weights, device="cpu")
    optimizer = model.optimizer(lr=0.1)
    model.forward_backward(batch)
    optimizer.step()
    export_model(model, out, adapters=True)
    return float(model.evaluate(batch))


@pytest.mark.parametrize(
    ("fields", "full", "expected"),
    [
        longer(_DISTILBERT, None, ("classifier",)),  # of two modules whose names end so
        (_ROBERTA, "", ()),
        longer(_ROBERTA, "LayerNorm", ("LayerNorm",)),
        longer(_ROBERTA, "classifier.out_proj", ("classifier.out_proj",)),
        longer(_LLAMA, "norm", ("norm",)),
        longer(_LLAMA, "lm_head,model.norm", ("lm_head", "model.norm")),
    ],
)
def test_peft_loads_what_options_ask_for(
    fields: dict[str, Any], full: str | None, expected: tuple[str, ...], tmp_path: Path
) -> None:
    case = Case(config=fields, stages=[["single"]], batch=4, dtype=torch.float32)
    stock_model(case).save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    options: dict[str, Any] = {"batch": 4, "sequence_length": 8, "precision": "fp32", "compile": False}
    plan = galvatron.plan(tmp_path / "weights", cluster_of(1), **options, dropout=False, lora=4, lora_full=full)
    assert plan.model.training.lora is not None
    assert plan.model.training.lora.full == expected
    batch = batches(case)[0]
    (loss,) = ranks(1).run(_train_and_write, plan, tmp_path / "weights", tmp_path / "out", batch)
    model = PeftModel.from_pretrained(stock_model(case), str(tmp_path / "out")).eval()
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(loss, rel=1e-5)


def _adapted(fields: dict[str, Any], lora: Lora) -> Lora | None:
    return load_any_model(fields, Training(sequence_length=8, dropout=False, lora=lora)).training.lora


def test_the_head_of_a_classifier_trains_unless_someone_says_otherwise() -> None:
    lora = Lora(rank=2, alpha=4)
    assert _adapted(_CLASSIFIER, lora) == replace(lora, full=("score",))
    assert _adapted(_LLAMA, lora) == replace(lora, full=())
    alone = load_any_model(_CLASSIFIER, Training(sequence_length=8, lora=replace(lora, full=())))
    assert alone.layers[-1].tuning is not None
    assert alone.layers[-1].tuning.adapter_parameters == 2 * (32 + 3), "then it is a projection like others"


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidInput, match="lora-full: 'clasifier' fits no module of Qwen3ForSequenceClassification"):
        _adapted(_CLASSIFIER, Lora(rank=2, alpha=4, full=("clasifier",)))
    both = _adapted(_CLASSIFIER, Lora(rank=2, alpha=4, full=("classifier", "score")))
    assert both is not None, "as peft's configurations of classifiers have it"


def _said(model: Any, plan: galvatron.Plan) -> str:
    with pytest.raises(InvalidInput) as error:
        galvatron.parallelize(model, plan, device="cpu")
    return str(error.value)


def test_what_the_plan_trains_is_not_frozen_silently() -> None:
    case = _Saved(config=_ROBERTA, stages=[["single"]], task="SEQ_CLS", modules=("classifier",))
    model = stock_model(case)
    options = LoraConfig(r=3, lora_alpha=6, target_modules=["query"])
    plan = galvatron.plan(
        model, cluster_of(1), batch=4, sequence_length=8, precision="fp32", compile=False, lora=3, lora_targets="query"
    )
    (said,) = ranks(1).run(_said, get_peft_model(model, options), plan)
    assert "parameter classifier.dense.weight is frozen, but the plan was made for one in which it trains" in said
    saved = _peft(case)
    for name, own in saved.named_parameters():
        own.requires_grad_(own.requires_grad and "modules_to_save" not in name)
    with pytest.raises(InvalidInput, match="classifier is saved with the adapters, but frozen"):
        lora_of(without_peft(saved))


def test_saved_modules_inside_of_others_are_refused() -> None:
    options = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["mlp", "gate_proj"])
    model = get_peft_model(stock_model(Case(config=_LLAMA, stages=[])), options)
    with pytest.raises(InvalidInput, match="gate_proj is inside of another module that is saved"):
        without_peft(model)


def test_plans_from_before_are_read(tmp_path: Path) -> None:
    """They say nothing of modules that train in full, and had none."""
    lora = Lora(rank=2, alpha=4.0)
    spec = load_any_model(_LLAMA, Training(sequence_length=8, dropout=False, lora=lora))
    spec = replace(spec, training=replace(spec.training, lora=lora))
    plan = priced(Request(model=spec, cluster=cluster_of(1), batch=4), [["single"] * 4])
    plan.save(tmp_path / "plan.json")
    assert "full" not in json.loads((tmp_path / "plan.json").read_text())["model"]["training"]["lora"]
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan
    assert lora_of_plan(plan.to_dict()) == lora


def test_adapters_that_are_there_say_their_own(tmp_path: Path) -> None:
    case = _Saved(config=_LLAMA, stages=[], modules=("lm_head",))
    with pytest.raises(InvalidInput, match="lora-full: norm given, but the adapters are there already, with lm_head"):
        galvatron.plan(_peft(case), cluster_of(1), batch=4, sequence_length=8, lora_full="norm")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("options", "unfrozen", "expected"),
    [
        ({"modules_to_save": ["embed_tokens"]}, "-", "embed_tokens is saved apart, .* tied to lm_head.weight"),
        ({"modules_to_save": ["lm_head"]}, "-", "lm_head is saved apart, .* tied to model.embed_tokens.weight"),
        ({}, "embed_tokens", "embed_tokens.weight trains beside the adapters and is tied to lm_head.weight"),
    ],
)
def test_what_peft_would_load_apart_is_refused(options: dict[str, Any], unfrozen: str, expected: str) -> None:
    case = Case(config=config("llama", vocab_size=64, tie_word_embeddings=True), stages=[["dp2"] * 4])
    model = get_peft_model(stock_model(case), LoraConfig(r=3, target_modules=["q_proj"], **options))
    for name, own in model.named_parameters():
        own.requires_grad_(own.requires_grad or unfrozen in name)
    with pytest.raises(InvalidInput, match=expected):
        lora_of(without_peft(model))
