"""Several documents packed into one row, told apart by positions that start anew: ours never see each other. The stock
model keeps them apart without a cache alone, which is how training calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from galvatron.families.layer import Activations
from galvatron.families.registry import layered_model

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@torch.no_grad()
def test_documents_in_one_row(kind: str) -> None:
    """A family of ours and a model of none: the loss of the packed row is that of its documents by themselves."""
    torch.manual_seed(0)
    stock: Any = AutoModelForCausalLM
    model: Any = stock.from_config(AutoConfig.for_model(kind, **_SIZES)).train()
    with torch.no_grad():
        for own in model.parameters():
            own.add_(torch.randn_like(own), alpha=0.1)
    ids = torch.randint(64, (2, 12))
    labels = ids.clone()
    labels[:, 5] = -100  # the first token of the second document follows nothing
    batch = {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[*range(5), *range(7)]] * 2)}
    apart = [model(input_ids=part, labels=part, use_cache=False).loss for part in (ids[:, :5], ids[:, 5:])]
    expected = float((apart[0] * 4 + apart[1] * 6) / 10)
    layered = layered_model(model)
    context = layered.context(batch, torch.float32)
    activations: Activations = ()
    for layer in layered.layers:
        activations = layer(activations, context)
    assert float(activations[0]) / layered.targets(batch) == pytest.approx(expected, rel=1e-5)
    assert float(model(**batch, use_cache=False).loss) == pytest.approx(expected, rel=1e-5)
    assert float(model(**batch, use_cache=True).loss) != pytest.approx(expected, rel=1e-3)
