"""Low-rank adapters: every plan trains them as peft does in one process, from the same weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bf16_oracle import excess
from longer import longer
from oracle import Case, batches, stock_model, trained
from parity import Trained, cluster_of, difference, run
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import ranks
from safetensors.torch import load_file
from small_models import config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import galvatron
from galvatron.core.spec import Training, schedule_named
from galvatron.core.spec.tuning import Lora
from galvatron.families.build import build_meta
from galvatron.families.lora import adapter_of, add_adapters, scale_at_rank
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.runtime import verify
from galvatron.runtime.compiled import why_not
from galvatron.train.checkpoints.export import export_model


@dataclass(frozen=True, kw_only=True)
class _Adapted(Case):
    targets: tuple[str, ...] = ("all-linear",)
    rank: int = 3
    steps: int = 3


def _peft(case: _Adapted) -> Any:
    """peft's own model, with adapters that are not zero."""
    targets: Any = list(case.targets) if case.targets != ("all-linear",) else "all-linear"
    conv = case.config["model_type"] == "gpt2"
    model: Any = get_peft_model(
        stock_model(case),
        LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=targets, fan_in_fan_out=conv),
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, own in model.named_parameters():
            if "lora_" in name:
                own.copy_(torch.randn(own.shape, generator=generator) * 0.1)
    return model


def _plan(case: _Adapted) -> galvatron.Plan:
    lora = Lora(rank=case.rank, alpha=2.0 * case.rank, targets=case.targets)
    spec = load_any_model(case.config, replace(case.training, sequence_length=case.length, lora=lora))
    return priced(_request(spec, case), case.stages, micro_batches=case.micro_batches)


def _request(spec: galvatron.ModelSpec, case: Case) -> Request:
    schedule = schedule_named(case.schedule)
    return Request(model=spec, cluster=cluster_of(case.devices), batch=case.batch, schedule=schedule)


def _train(case: _Adapted, plan: galvatron.Plan, given: Sequence[dict[str, Tensor]]) -> Trained:
    model = galvatron.parallelize(_peft(case), plan, dtype=case.dtype, device="cpu")
    assert all(local.trained == ("lora_" in local.name) for local in model.locals)
    return run(case, model, given)


def _check(case: _Adapted) -> None:
    found = ranks(case.devices).run(_train, case, _plan(case), batches(case))
    alone: nn.Module = _peft(case).get_base_model()
    assert difference(case, found, trained(case, alone)) is None


_LLAMA = config("llama", vocab_size=64)


@pytest.mark.parametrize(
    "stages",
    [
        longer([["dp2"] * 4]),
        longer([["sdp2"] * 4]),
        longer([["tp2"] * 4]),
        [["single"] * 2, ["single"] * 2],
        [["dp2+zero2", "tp2+sp", "tp2+sp+rc", "sdp2+rc"]],
    ],
    ids=["dp", "sdp", "tp", "pp", "mixed"],
)
def test_trains_as_peft_does(stages: list[list[str]]) -> None:
    _check(_Adapted(config=_LLAMA, stages=stages, batch=4, micro_batches=2, clip=0.5))


def _base(case: Any) -> nn.Module:
    base: nn.Module = _peft(case).get_base_model()
    return base


@pytest.mark.parametrize(
    "stages",
    [[["dp2+zero2", "tp2", "sdp2+rc", "tp2"]], longer([["single"] * 2, ["single"] * 2]), longer([["sdp2"] * 4])],
)
def test_in_bf16(stages: list[list[str]]) -> None:
    """Adapters have masters in fp32; what is frozen is in bf16 alone."""
    case = _Adapted(config=_LLAMA, stages=stages, batch=4, micro_batches=2, dtype=torch.bfloat16)
    found = ranks(2).run(_train, case, _plan(case), batches(case))
    assert excess(case, found, _base) is None


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the widths of what is multiplied element by element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            self.widths.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_adapters_are_scaled_at_their_rank() -> None:
    """Wide results and their gradients are not multiplied."""
    stock = nn.Sequential(nn.Linear(6, 8, bias=False))
    model: Any = get_peft_model(stock, LoraConfig(r=2, lora_alpha=3, target_modules=["0"]))
    nn.init.ones_(model.base_model.model[0].lora_B["default"].weight)
    given = torch.randn(5, 6)
    expected = model(given)
    scale_at_rank(model)
    with _Products() as noted:
        found = model(given)
        torch.autograd.backward(found.sum())
    assert set(noted.widths) == {2}
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(why_not("cpu") is not None, reason=str(why_not("cpu")))
@pytest.mark.parametrize("wide", [False, True])
def test_compiled(wide: bool) -> None:
    """Only adapters have gradients, in compiled blocks too; where these are wide, products of adapters are merged."""
    compiled = Training(dropout=False, compile=True)
    stages = [["dp2", "tp2", "tp2+rc", "dp2+rs", "dp2"]]
    size = {"hidden_size": 160, "intermediate_size": 160} if wide else {}
    _check(
        _Adapted(
            config=config("llama", vocab_size=64, num_hidden_layers=3, **size),
            stages=stages,
            batch=32 if wide else 4,
            rank=4,
            dtype=torch.float32,
            training=compiled,
        )
    )


@pytest.mark.parametrize(
    ("family", "targets", "stages"),
    [
        ("gpt2", ("c_attn", "c_proj"), [["tp2"] * 4]),
        ("llama", ("q_proj", "v_proj"), [["tp2", "sdp2", "tp2", "dp2"]]),
        longer("bert", ("query", "dense"), [["tp2", "tp2", "sdp2", "dp2"]]),
        longer("t5", ("q", "wo"), [["tp2"] * 3, ["sdp2"] * 4]),
    ],
)
def test_families(family: str, targets: tuple[str, ...], stages: list[list[str]]) -> None:
    """Fused projections of GPT-2, whose weights are transposed; adapters on some projections alone."""
    _check(_Adapted(config=config(family), stages=stages, targets=targets, batch=4))


_QWEN = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("stages", [longer([["tp2"] * 4]), longer([["sdp2"] * 2, ["tp2"] * 2])])
def test_a_model_of_no_family(stages: list[list[str]]) -> None:
    """Which is compared with a tiny copy that has adapters too, before it trains."""
    _check(_Adapted(config=_QWEN, stages=stages, batch=4, dtype=torch.float32))


# Files


def _start(case: _Adapted, plan: galvatron.Plan, folders: list[Path], batch: dict[str, Tensor]) -> float:
    """On a rank: from a folder of weights and one of adapters; trained for a step, and written in both forms."""
    weights, adapters, merged, alone = folders
    model = galvatron.parallelize(None, plan, weights=weights, adapters=adapters, dtype=case.dtype, device="cpu")
    loss = float(model.evaluate(batch))
    export_model(model, merged)
    export_model(model, alone, adapters=True)
    return loss


@pytest.mark.parametrize("family", ["llama", longer("gpt2")])
def test_peft_loads_ours_and_we_load_pefts(family: str, tmp_path: Path) -> None:
    """A folder of adapters goes in and comes out the same; merged, ``from_pretrained`` needs no peft."""
    stages = [["tp2", "sdp2", "tp2", "tp2"]]
    case = _Adapted(config=config(family), stages=stages, batch=4, dtype=torch.float32)
    theirs = _peft(case).eval()
    theirs.save_pretrained(tmp_path / "adapters")
    stock_model(case).save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    plan = galvatron.plan(theirs, cluster_of(2), batch=4, sequence_length=8, precision="fp32", compile=False)
    plan = priced(_request(plan.model.spec(), case), stages, micro_batches=1)
    folders = [tmp_path / name for name in ("weights", "adapters", "merged", "alone")]
    batch = batches(case)[0]
    with torch.no_grad():
        expected = theirs(**batch)
    for loss in ranks(2).run(_start, case, plan, folders, batch):
        assert loss == pytest.approx(float(expected.loss), rel=1e-5)
    ours, given = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "adapters"))
    assert ours.keys() == given.keys()
    assert all(torch.equal(ours[name], given[name]) for name in given)
    again = PeftModel.from_pretrained(stock_model(case), str(tmp_path / "alone")).eval()
    whole, report = type(stock_model(case)).from_pretrained(  # type: ignore[attr-defined]
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, expected.logits)
        torch.testing.assert_close(whole.eval()(**batch).logits, expected.logits, rtol=1e-4, atol=1e-5)


def _fresh(plan: galvatron.Plan) -> dict[str, Tensor]:
    return {name: own.clone() for name, own in galvatron.parallelize(None, plan, device="cpu").whole_parameters()}


def test_adapters_start_as_pefts_do() -> None:
    """B zero, A spread as peft's; the same under every plan."""
    case = _Adapted(config=_LLAMA, stages=[["tp2"] * 4], batch=4)
    (first, second), (other, _) = (
        ranks(2).run(_fresh, _plan(replace(case, stages=stages))) for stages in (case.stages, [["sdp2"] * 4])
    )
    for name, own in first.items():
        assert torch.equal(own, second[name])
        assert torch.equal(own, other[name])
        if ".lora_B." in name:
            assert not own.any()
        elif ".lora_A." in name:
            assert own.abs().max() == pytest.approx(own.shape[1] ** -0.5, rel=0.2)


# What the planner counts, and what is refused


def test_the_plan_counts_adapters(tmp_path: Path) -> None:
    case = _Adapted(config=_LLAMA, stages=[["dp2"] * 4], batch=4)
    model = _peft(case)
    plan = galvatron.plan(model, cluster_of(2), batch=4, sequence_length=8, precision="fp32", compile=False)
    adapters = sum(own.numel() for name, own in model.named_parameters() if "lora_" in name)
    spec = plan.model.spec()
    assert spec.trained_parameters == adapters
    assert spec.parameters == sum(own.numel() for own in model.parameters())
    assert [layer.name for layer in spec.layers] == ["embedding+frozen", *["decoder+lora"] * 2, "head+passed"]
    assert plan.model.training.lora == Lora(
        rank=3, alpha=6, targets=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"), full=()
    )
    plan.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan
    by_hand = _plan(case)
    frozen = spec.parameters - adapters
    assert by_hand.stages[0].memory.states == 4 * frozen + 16 * adapters


_MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 64,
    "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip


def test_all_linear_leaves_experts_out() -> None:
    """peft takes experts and their router for linear, which have no adapters here."""
    model = build_meta(_MIXTRAL, Training())
    add_adapters(model, Lora(rank=2, alpha=4))
    adapted = {name.rpartition(".")[2] for name, own in model.named_modules() if adapter_of(own) is not None}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    spec = load_any_model(_MIXTRAL, Training(sequence_length=8, lora=Lora(rank=2, alpha=4)))
    assert spec.trained_parameters == 2 * 2 * (2 * (16 + 16) + 2 * (16 + 8))


@pytest.mark.slow
def test_adapters_in_some_blocks_and_beside_them() -> None:
    """Of a model of unknown family: its plan is one for this model, whatever its parts are called when traced."""
    config = {**_MIXTRAL, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "pad_token_id": 0}
    del config["num_local_experts"]
    targets = ("model.layers.1.self_attn.q_proj",)
    spec = load_any_model(
        config, Training(sequence_length=8, dropout=False, lora=Lora(rank=2, alpha=4, targets=targets))
    )
    assert [layer.name for layer in spec.layers] == ["embedding+frozen", "block+frozen", "block+lora", "head+passed"]
    plan = priced(Request(model=spec, cluster=cluster_of(2), batch=4), [["dp2"] * 4])
    names = ranks(2).run(_fresh, plan)[0]
    assert [name for name in names if "lora_A" in name] == [f"{targets[0]}.lora_A.default.weight"]
    assert ranks(2).run(_compared, plan) == [None, None]


@pytest.mark.slow
def test_adapters_around_the_blocks_start_from_nothing() -> None:
    """In layers that are traced, whose parts have names of their own."""
    fields = {"model_type": "electra", "architectures": ["ElectraForSequenceClassification"], "embedding_size": 8}
    training = Training(sequence_length=8, dropout=False, lora=Lora(rank=2, alpha=4))
    spec = load_any_model({**_MIXTRAL, **fields}, training)
    assert [layer.name for layer in spec.layers] == ["embedding+lora", *["block+lora"] * 2, "head"]
    first, second = ranks(2).run(_fresh, priced(Request(model=spec, cluster=cluster_of(2), batch=4), [["dp2"] * 4]))
    assert "electra.embeddings_project.lora_A.default.weight" in first
    assert all(torch.equal(own, second[name]) for name, own in first.items())


def _compared(plan: galvatron.Plan) -> str | None:
    """On a rank: the comparison before training, which raises if there is none."""
    training = plan.model.training
    assert plan.model.config is not None
    assert training.lora is not None
    stock = build_meta(plan.model.config, training, as_named=True)
    add_adapters(stock, training.lora)
    return verify.difference(stock, plan, device=torch.device("cpu"))


def _said(case: _Adapted, plan: galvatron.Plan, options: dict[str, Any], trained: str, frozen: str) -> str:
    """On a rank: what is said to a model with such adapters, of which besides what is so named trains, or does not."""
    model = get_peft_model(stock_model(case), LoraConfig(r=3, lora_alpha=6, **options))
    for name, own in model.named_parameters():
        own.requires_grad_((own.requires_grad or trained in name) and frozen not in name)
    try:
        galvatron.parallelize(model, plan, device="cpu")
    except galvatron.InvalidInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "q_proj has a variant of LoRA"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens adapts a Embedding"),
        ({"target_modules": "all-linear", "modules_to_save": ["lm_head"]}, "its parameter lm_head.weight trains, but"),
        ({"target_modules": "all-linear", "lora_dropout": 0.1}, "has dropout, with which tensor parallelism cannot"),
        ({"target_modules": ["q_proj"]}, "adapters of its layer 1 (decoder) have 192 parameters, those in the plan"),
    ],
)
def test_what_cannot_run_is_refused(options: dict[str, Any], expected: str) -> None:
    case = _Adapted(config=_LLAMA, stages=[["tp2"] * 4], batch=4)
    for said in ranks(2).run(_said, case, _plan(case), options, "nothing", "nothing"):
        assert expected in said


@pytest.mark.parametrize(
    ("trained", "frozen", "expected"),
    [
        ("q_proj.base_layer", "nothing", "peft: model.layers.0.self_attn.q_proj.weight trains beside the adapters"),
        ("nothing", "lora_A", "lora_A.default.weight is frozen; adapters train as a whole"),
        ("nothing", "lora_", "is_trainable=True"),
    ],
)
def test_what_trains_besides_is_not_frozen_silently(trained: str, frozen: str, expected: str) -> None:
    """Such as norms, and all biases; and adapters that were loaded to be looked at only."""
    case = _Adapted(config=_LLAMA, stages=[["tp2"] * 4], batch=4)
    for said in ranks(2).run(_said, case, _plan(case), {"target_modules": "all-linear"}, trained, frozen):
        assert expected in said
    model = _peft(case)
    for name, own in model.named_parameters():
        own.requires_grad_((own.requires_grad or trained in name) and frozen not in name)
    with pytest.raises(galvatron.InvalidInput, match=re.escape(expected)):
        galvatron.plan(model, cluster_of(2), batch=4, sequence_length=8, precision="fp32", compile=False)
