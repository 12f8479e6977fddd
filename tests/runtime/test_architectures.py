"""Architectures of today under mixed plans on four processes: a tiny copy trains as the stock model does in one.

Their rules come from transformers' own plans, or from a run of a block where there is none (``modernbert`` and what
follows it). Those with experts are in ``test_experts``.
"""

from __future__ import annotations

import copy
import functools
from itertools import cycle
from typing import Any

import pytest
import torch
from longer import longer
from ranks import ranks
from torch import nn
from transformers import AutoConfig

from galvatron.core.spec import Attention, Training
from galvatron.families.build import build_meta, stock_class, without_weights
from galvatron.families.registry import layered_model
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.unpriced import facts_of, unpriced

_WHISPER = {
    "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "max_source_positions": 32,
}  # fmt: skip
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "apertus": ("ApertusForCausalLM", {}),
    "modernbert": ("ModernBertForMaskedLM", {}),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
    "opt": ("OPTForCausalLM", {}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 64}),
    "umt5": ("UMT5ForConditionalGeneration", {"num_layers": 4, "num_decoder_layers": 4}),
}
_IN_ONE_STAGE, _IN_PIPELINES = ("phi3",), ("gpt_neox", "opt")
"""What ``make test`` has: packed projections; parallel residuals, numbers of heads.
``test_experts`` has norms of heads, ``test_unknown_family`` tied weights. The longer run has all in one stage and in
two."""
_TENSOR = ("dp2-tp2", "tp4", "sdp2-tp2+rc", "sdp4", "tp2-dp2", "tp2-sdp2", "dp4+zero2")
_WHOLE = ("dp4", "sdp4+rc", "dp2-sdp2", "dp4+zero2")
_TWO_STAGES = ("tp2", "sdp2+rc", "dp2", "tp2+rc")


@functools.cache
def _stock(kind: str) -> tuple[nn.Module, Training]:
    name, options = _MODELS[kind]
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, **options}
    config = AutoConfig.for_model(kind, **sizes)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 4
    config.architectures = [name]
    stock: Any = stock_class(config, as_named=True)
    training = Training(
        dropout=False, attention=Attention.FUSED if stock._supports_sdpa else Attention.EAGER, sequence_length=16
    )
    return build_meta(config, training, as_named=True), training


def _plan(kind: str, stages: int) -> Plan:
    model, training = _stock(kind)
    layered = layered_model(without_weights(model))
    split = any(layer.rules for layer in layered.layers)
    turns = cycle(_TWO_STAGES if stages == 2 else _TENSOR if split else _WHOLE)
    whole = "dp2" if stages == 2 else "dp4"
    chosen = []
    for layer in layered.layers:
        strategy = next(turns)
        chosen.append(strategy if layer.rules or "tp" not in strategy else whole)
    if layered.layers[-1].projection is not None:  # its strategy without other flags
        chosen[-1] = f"{chosen[-1].partition('+')[0]}+fl"
    middle = len(chosen) // 2
    return unpriced(facts_of(layered, training, kind), [chosen] if stages == 1 else [chosen[:middle], chosen[middle:]])


def _difference(model: nn.Module, plan: Plan) -> str | None:
    from galvatron.runtime.verify import difference

    return difference(copy.deepcopy(model), plan, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", [own if own in _IN_ONE_STAGE else longer(own) for own in _MODELS])
def test_a_mixed_stage_trains_as_one_process(kind: str) -> None:
    """Loss and every gradient, with labels that do not count and with padding."""
    _check(kind, 1)


@pytest.mark.parametrize("kind", [own if own in _IN_PIPELINES else longer(own) for own in _MODELS])
def test_mixed_pipelines_train_as_one_process(kind: str) -> None:
    _check(kind, 2)


@pytest.mark.parametrize("kind", ["roberta", longer("electra")])
def test_sequences_are_divided_where_regions_end_before_the_sum(kind: str) -> None:
    """BERT's form: norms outside of attention and of the feed-forward network see some of the tokens."""
    model, training = _stock(kind)
    layered = layered_model(without_weights(model))
    turns = cycle(("tp4+sp", "dp2-tp2+sp+rc", "sdp2-tp2+sp", "tp2-dp2+sp"))
    chosen = [next(turns) if layer.kind == "block" else "dp2-tp2" for layer in layered.layers]
    plan = unpriced(facts_of(layered, training, kind), [chosen])
    assert ranks(4).run(_difference, model, plan) == [None] * 4


def _check(kind: str, stages: int) -> None:
    model, _ = _stock(kind)
    found = ranks(4).run(_difference, model, _plan(kind, stages))
    assert found == [None] * 4
