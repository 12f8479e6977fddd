"""Padding, targets that do not count, and positions in the batches that ``fuzz_training.py`` draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from galvatron.families.layer import IGNORED

__all__ = ["mask_any", "pad"]

_PACKING = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Olmo2ForCausalLM", "GemmaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM",
)  # fmt: skip


def mask_any(case: Any, batch: dict[str, Tensor], generator: torch.Generator) -> None:
    """Of any architecture: padding on the right, or in a third of the cases on the left, and targets left out."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.ndim != 2 or labels.shape != ids.shape or labels.is_floating_point():
        return
    count = ids.shape[1]
    if case.padding and not {"attention_mask", "decoder_input_ids"} & batch.keys():
        kept = torch.randint(count // 2, count + 1, (len(ids), 1), generator=generator)
        places = torch.arange(count)[None]
        mask = places >= count - kept if case.seed % 3 == 0 else places < kept
        batch["attention_mask"], labels = mask.long(), torch.where(mask, labels, IGNORED)
    left_out = torch.rand(labels[:, 1:].shape, generator=generator) < 0.2
    batch["labels"] = torch.cat([labels[:, :1], torch.where(left_out, IGNORED, labels[:, 1:])], dim=1)


def pad(case: Any, batch: dict[str, Tensor], generator: torch.Generator) -> None:
    """Of the fuzzer's own models: padding on the right, targets left out, and positions that begin
    anywhere, or anew with each document."""
    ids, labels = batch["input_ids"], batch["labels"]
    padding = {"roberta": 1}.get(case.family, 0)
    batch["input_ids"] = ids = torch.where(ids == padding, padding + 2, ids)  # which some models take for padding
    if case.padding:
        # A window that sees padding alone makes the stock model's own gradients NaN.
        window = dict(case.switches).get("sliding_window") or case.length
        least = max(case.length // 2, case.length - window + 1)
        kept = torch.randint(least, case.length + 1, (len(ids), 1), generator=generator)
        mask = torch.arange(case.length)[None] < kept
        batch["attention_mask"] = mask.long()
        if labels.shape == mask.shape and not case.stock.startswith("T5"):
            batch["labels"] = torch.where(mask, labels, IGNORED)
    if labels.ndim > 1:
        batch["labels"][:, 1:] = torch.where(
            torch.rand(labels[:, 1:].shape, generator=generator) < 0.2, IGNORED, batch["labels"][:, 1:]
        )
    if case.positions and case.stock in _PACKING and case.seed % 2:
        batch["position_ids"] = torch.stack([_packed(case.length, generator) for _ in ids])
    elif case.positions and case.stock in ("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM"):
        batch["position_ids"] = torch.arange(case.length) + torch.randint(8, (len(ids), 1), generator=generator)


def _packed(length: int, generator: torch.Generator) -> Tensor:
    """Positions of a row with one to three documents, which the stock models tell apart by them."""
    count = int(torch.randint(3, (), generator=generator))
    starts = torch.randint(1, length, (count,), generator=generator)
    begins = torch.zeros(length, dtype=torch.long)
    begins[starts] = starts
    return torch.arange(length) - begins.cummax(0).values
