"""What a new user has: a chat model's folder as ``save_pretrained`` writes it, and a few conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from galvatron.train.data.vocabulary import train_tokenizer

__all__ = ["CHAT_TEMPLATE", "TAUGHT", "chat_model", "write_chat"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAUGHT = {"what is the colour of the sea?": "blue as ink", "who sings at night?": "the nightingale"}
_VOCABULARY = 320


def chat_model(folder: Path, seed: int = 3) -> Path:
    """A tiny Llama with weights, a tokenizer with a chat template, and generation settings."""
    texts = [*TAUGHT, *TAUGHT.values(), "<|user|> <|assistant|>"]
    train_tokenizer(texts, folder, words=_VOCABULARY, sentinels=0)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    kind: Any = LlamaForCausalLM
    model = kind(config)
    model.save_pretrained(folder)
    return folder


def write_chat(path: Path) -> Path:
    """Conversations in which each question has one answer."""
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in TAUGHT.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 8), encoding="utf-8")
    return path
