"""In bf16 with fp32 masters a plan is as close to fp32 training as a single process in bf16 is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from bf16_oracle import excess
from longer import longer
from oracle import Case, batches, first_weights
from parity import cluster_of, plan_for, train
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron
from galvatron.core.spec import ONE_F_ONE_B, Training
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_PLANS = {
    "bert": [["tp2-dp2", "sdp4", "dp2-tp2+rc", "dp4+zero2"]],
    "gpt2": [["tp2", "sdp2"], ["tp2+sp+rc", "dp2"]],
    "llama": [["dp4+zero2", "tp4+sp", "tp4", "dp2-sdp2"]],
    "t5": [["tp2", "sdp2", "dp2", "tp2"], ["dp2", "sdp2+rc", "tp2"]],
    "vit": [["single"], ["single"], ["single"], ["single"]],
}


@pytest.mark.parametrize("family", ["bert", longer("gpt2"), longer("llama"), longer("t5"), longer("vit")])
def test_bf16(family: str) -> None:
    case = Case(config=config(family), stages=_PLANS[family], micro_batches=2, dtype=torch.bfloat16)
    found = ranks(4).run(train, case, plan_for(case), first_weights(case), batches(case))
    assert excess(case, found) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("padding", [False, True])
def test_divided_sequences(family: str, padding: bool) -> None:
    """Blocks of a ring are merged in fp32, so that a ring rounds no more than one attention does."""
    stages = [["ring4+zero3", "ring2-ulysses2+rs", "tp2-ring2", "ulysses2-tp2"]]
    case = Case(config=config(family), stages=stages, micro_batches=2, dtype=torch.bfloat16, padding=padding)
    found = ranks(4).run(train, case, plan_for(case), first_weights(case), batches(case))
    assert excess(case, found) is None


def _first_loss(kind: str, content: dict[str, Any], plan: galvatron.Plan, batch: dict[str, Tensor]) -> float:
    model = _of_buffers(kind, content)
    return float(galvatron.parallelize(model, plan, device="cpu", dtype="bf16", check=False).forward_backward(batch))


def _of_buffers(kind: str, content: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **content)
    config.architectures = [_HEADS[kind]]
    return getattr(transformers, _HEADS[kind])(config).train()


_HEADS = {"openai-gpt": "OpenAIGPTLMHeadModel", "m2m_100": "M2M100ForConditionalGeneration"}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("openai-gpt", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}),
        longer(
            "m2m_100",
            {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 40}
            | {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
        ),
    ],
)
def test_buffers_that_must_have_the_type_of_activations(kind: str, content: dict[str, Any]) -> None:
    """Tables of positions and masks, in which bf16 would otherwise end: as ``model.to(torch.bfloat16)`` has them."""
    content = {**content, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "dropout": 0.0} | {
        "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0
    }  # fmt: skip
    stock = _of_buffers(kind, content)
    ids = torch.arange(4, 36).view(4, 8)
    batch = {"input_ids": ids, "labels": ids.clone()}
    spec = galvatron.describe(stock, batch, Training(dropout=False))
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=ONE_F_ONE_B)
    plan = priced(request, [["dp2"] * len(spec.layers)], micro_batches=1)
    with torch.no_grad():
        expected = float(stock.to(torch.bfloat16)(**batch).loss)
    for loss in ranks(2).run(_first_loss, kind, content, plan, batch):
        assert loss == pytest.approx(expected, rel=5e-3)


def _wide(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.MambaForCausalLM(config).train()


def _losses_of_wide(config: Any, plan: galvatron.Plan, batch: dict[str, Tensor]) -> tuple[float, float]:
    """On a rank: evaluated first, then before and after a step."""
    model = galvatron.parallelize(_wide(config), plan, device="cpu", dtype="bf16", check=False)
    optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
    evaluated, first = float(model.evaluate(batch)), float(model.forward_backward(batch))
    assert evaluated == pytest.approx(first)
    optimizer.step()
    optimizer.zero_grad()
    return first, float(model.forward_backward(batch))


def test_models_that_widen_what_they_carry() -> None:
    """``lm_head(hidden).float()`` meets the hidden states, which stand in for the logits in a fused loss; and hidden
    states between stages are in fp32, in whatever type a stage computes."""
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=64, state_size=4, use_cache=False)
    ids = torch.arange(4, 36).view(4, 8)
    batch = {"input_ids": ids, "labels": ids.clone()}
    spec = galvatron.describe(_wide(config), batch, Training())
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=ONE_F_ONE_B)
    plain, *others = (
        ranks(2).run(_losses_of_wide, config, priced(request, stages, micro_batches=micro_batches), batch)
        for stages, micro_batches in (
            ([["dp2"] * 4], 1),
            ([["dp2"] * 3 + ["dp2+fl"]], 1),
            ([["single", "single"], ["single", "single+fl"]], 2),
        )
    )
    assert plain[0][1] < plain[0][0] - 0.01
    for other in others:
        assert other[0] == pytest.approx(plain[0], rel=2e-3)
