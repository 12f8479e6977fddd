"""A small Llama with a tokenizer in ``mine/``, as ``save_pretrained`` writes it, and conversations in ``chat.jsonl``.

    python examples/chat_model.py
    galvatron train ./mine --data chat.jsonl --devices 2

A stand-in for a model and data of your own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONVERSATIONS = (("who are you?", "i am a small model."), ("what is the capital of france?", "paris."))
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([text for pair in CONVERSATIONS for text in pair] * 50, trainer)
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE)


def main() -> None:
    words = tokenizer()
    words.save_pretrained("mine")
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    kind: Any = LlamaForCausalLM
    kind(config).save_pretrained("mine")
    with Path("chat.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in CONVERSATIONS * 100:
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": said}) + "\n")


if __name__ == "__main__":
    main()
