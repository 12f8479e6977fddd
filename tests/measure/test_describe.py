"""What the planner is told of models with experts, and of models that cannot be traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from longer import longer
from torch import Tensor, nn
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, ModelSpec, Precision, Training
from galvatron.families import load_model
from galvatron.families.build import build_meta
from galvatron.measure.describe import describe
from galvatron.runtime import split_trial

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _EXPERTS, _CHOSEN, _TOKENS = 16, 24, 4, 2, 4, 2, 8


@cache
def _mixtral(precision: Precision) -> ModelSpec:
    """What is told of a small Mixtral."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        num_local_experts=_EXPERTS,
        num_experts_per_tok=_CHOSEN,
        max_position_embeddings=32,
        sliding_window=None,
    )
    model: nn.Module = MixtralForCausalLM._from_config(config, attn_implementation="sdpa")
    ids = torch.zeros((1, _TOKENS), dtype=torch.long)
    spec = describe(model, {"input_ids": ids, "labels": ids}, Training(precision=precision))
    assert spec.parameters == sum(own.numel() for own in model.parameters())
    return spec


@pytest.mark.parametrize("precision", [Precision.BF16, longer(Precision.FP32)])
def test_flops_of_experts_equal_a_count_by_hand(precision: Precision) -> None:
    spec = _mixtral(precision)
    width = _HIDDEN // _HEADS
    projections = 2 * _TOKENS * _HIDDEN * width * (_HEADS + 2 * _KV_HEADS + _HEADS)
    scores = 2 * 2 * _HEADS * _TOKENS * _TOKENS * width // 2  # half of each product is masked
    router = 2 * _TOKENS * _HIDDEN * _EXPERTS
    experts = _TOKENS * _CHOSEN * 3 * 2 * _HIDDEN * _INNER
    assert spec.layers[1].forward_flops == projections + scores + router + experts


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        used = self.linear(hidden)
        made: Tensor = hidden + used.mean() * len(used.nonzero())
        return made


class _CountingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([_Counting(), _Counting()])
        self.head = nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def test_a_model_that_looks_at_values_is_named() -> None:
    ids = torch.zeros((1, _TOKENS), dtype=torch.long)
    with pytest.raises(InvalidInput, match=r"_CountingModel: .*nonzero.* cannot be traced .*\.toml"):
        describe(_CountingModel(), {"ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("kind", "attention", "compiled"),
    [
        *((kind, Attention.FUSED, False) for kind in ("bert", "llama")),
        ("gpt2", Attention.EAGER, False),
        longer("gpt2", Attention.FUSED, False),
        *(longer(kind, Attention.EAGER, False) for kind in ("bert", "llama")),
        ("llama", Attention.FUSED, True),
        *(longer(kind, Attention.FUSED, True) for kind in ("bert", "gpt2")),
    ],
)
def test_description_is_the_zoos(kind: str, attention: Attention, compiled: bool, tmp_path: Path) -> None:
    """For families that the zoo knows by arithmetic, measuring must find the same."""
    sizes = {"gpt2": {"n_layer": 2}, "bert": {"num_hidden_layers": 2}, "llama": {"num_hidden_layers": 2}}[kind]
    config = AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(tmp_path)
    training = Training(attention=attention, dropout=False, sequence_length=256, compile=compiled)
    ids = torch.zeros(2, 256, dtype=torch.long)
    spec = describe(build_meta(config, training), {"input_ids": ids, "labels": ids}, training)
    assert spec.training == training
    assert spec.family == "generic"
    assert [layer.name for layer in spec.layers] == ["embedding", "block", "block", "head"]
    for found, known in zip(spec.kinds, load_model(tmp_path, training).kinds, strict=True):
        for field in ("parameters", "tied_parameters", "boundary_bytes"):
            assert getattr(found, field) == getattr(known, field), (found.name, field)
        # Some versions compute rotary positions by a tiny product.
        assert found.forward_flops == pytest.approx(known.forward_flops, rel=1e-9, abs=1e5)
        assert found.activation_bytes == pytest.approx(known.activation_bytes, rel=0.005, abs=10_000)
        assert known.transient_bytes <= found.transient_bytes < 4 * known.transient_bytes + 2 * known.boundary_bytes
        for ours, theirs in ((found.selective, known.selective), (found.but_attention, known.but_attention)):
            assert (ours is None) == (theirs is None), found.name
            if ours is not None and theirs is not None:
                assert ours.flops == pytest.approx(theirs.flops, rel=1e-9, abs=1e5)
                kept = [own.split_bytes + own.replicated_bytes for own in (ours, theirs)]
                assert kept[0] == pytest.approx(kept[1], rel=0.005)
        # Llama has a plan in transformers; how the others are split a run shows.
        assert found.tensor_parallel is not None
        assert known.tensor_parallel is not None
        parallel = replace(known.tensor_parallel, sequence_divides=found.tensor_parallel.sequence_divides)
        assert found.tensor_parallel == parallel
        # Of an odd number of words the larger half was traced.
        assert found.replicated_parameters == pytest.approx(known.replicated_parameters, abs=1024)
        assert found.replicated_flops == pytest.approx(known.replicated_flops, abs=1e-4 * found.forward_flops)
        assert found.split_activation_bytes == pytest.approx(known.split_activation_bytes, rel=0.01, abs=10_000)


def test_in_half_precision() -> None:
    full, half = _mixtral(Precision.FP32), _mixtral(Precision.BF16)
    assert full.layers[1].boundary_bytes == 2 * half.layers[1].boundary_bytes == _TOKENS * _HIDDEN * 4


def test_blocks_of_several_kinds() -> None:
    """Dense blocks first, then blocks with experts: two kinds, each with its own figures."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=4, first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    config.architectures = ["DeepseekV3ForCausalLM"]
    model = build_meta(config, Training(dropout=False))
    ids = torch.zeros(1, 8, dtype=torch.long)
    spec = describe(model, {"input_ids": ids, "labels": ids})
    assert [layer.name for layer in spec.layers] == ["embedding", "block-dense", *["block-experts"] * 3, "head"]
    assert spec.parameters == sum(own.numel() for own in model.parameters())
    dense, experts = spec.layers[1:3]
    # The plan splits no attention: all of it is done on each rank.
    assert 0 < dense.replicated_flops < dense.forward_flops
    assert experts.parameters > dense.parameters


def test_what_cannot_be_split_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    config.architectures = ["MixtralForCausalLM"]
    ids = torch.zeros(1, 8, dtype=torch.long)
    plan = dict(MixtralConfig.base_model_tp_plan)
    monkeypatch.setattr(MixtralConfig, "base_model_tp_plan", plan | {"layers.*.self_attn.o_proj": "diagonal"})
    spec = describe(build_meta(config, Training(dropout=False)), {"input_ids": ids, "labels": ids})
    assert not spec.splittable
    assert "splits self_attn.o_proj as 'diagonal', which cannot be done here" in caplog.text


@pytest.mark.parametrize("divides", [True, False])
def test_a_sequence_that_must_not_be_divided_leaves_tensor_parallelism(
    divides: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(
        "qwen2", vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    ids = torch.zeros(1, 8, dtype=torch.long)
    problem = None if divides else "it differs"
    monkeypatch.setattr(split_trial, "split_difference", lambda *_, sequence=False: problem if sequence else None)
    spec = describe(build_meta(config, Training(dropout=False)), {"input_ids": ids, "labels": ids})
    block = spec.layers[1]
    assert block.tensor_parallel is not None
    assert block.allows_sequence_parallel(2) is divides
    assert ("no sequence parallelism is offered, because it differs" in caplog.text) is not divides
