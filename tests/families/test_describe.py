"""What the planner is told of models with experts, and of models that cannot be traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision, Training
from galvatron.families.generic.describe import describe

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _EXPERTS, _CHOSEN, _TOKENS = 16, 24, 4, 2, 4, 2, 8


@pytest.mark.parametrize("precision", [*Precision])
def test_flops_of_experts_equal_a_count_by_hand(precision: Precision) -> None:
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
    model: nn.Module = MixtralForCausalLM._from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    ids = torch.zeros((1, _TOKENS), dtype=torch.long)
    spec = describe(model, {"input_ids": ids, "labels": ids}, Training(precision=precision))
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
