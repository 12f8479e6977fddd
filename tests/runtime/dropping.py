"""Watches what dropout drops on each rank, and says whether ranks draw alike where they should and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from oracle import Case, batches, first_weights
from parity import Held, held, plan_for
from ranks import ranks
from small_models import LAYERS, config
from torch import Tensor
from torch.nn import functional

import galvatron
from galvatron.core.spec import Attention, Training

__all__ = [
    "FAMILIES",
    "RATE",
    "Seen",
    "disagreement",
    "drawn_alike",
    "equal",
    "observe",
    "observed",
    "shared_by_rows",
    "with_dropout",
]

RATE = 0.25
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE},
    "gpt2": {"resid_pdrop": RATE, "attn_pdrop": RATE, "embd_pdrop": RATE},
    "llama": {"attention_dropout": RATE},
    "swin": {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE, "drop_path_rate": RATE},
    "t5": {"dropout_rate": RATE},
    "vit": {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE},
}
"""What turns dropout on."""


def with_dropout(family: str, strategy: str, **changes: Any) -> Case:
    """One strategy for all layers; attention is eager, so that its dropout can be watched."""
    return Case(
        config=config(family, **FAMILIES[family]),
        stages=[[strategy] * LAYERS[family]],
        training=Training(attention=Attention.EAGER),
        dtype=torch.float32,
        steps=1,
        **changes,
    )


@dataclass
class Seen:
    """What one rank saw."""

    losses: list[float]
    outputs: list[list[Tensor]]
    """For each layer, what it gave in each micro-batch."""
    masks: list[Tensor]
    """Of each dropout, in the order of the passes: which elements were kept."""
    held: list[Held]
    generator_untouched: bool


def observe(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]], seed: int = 0) -> Seen:
    """On a rank: run the batches one after the other and watch."""
    model = galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu", seed=seed)
    outputs: list[list[Tensor]] = [[] for _ in case.stages[0]]
    for number, slot in enumerate(model._pipeline.stage.stage_layers):
        slot.register_forward_hook(lambda _, __, given, number=number: outputs[number].append(given[-1].detach()))
    masks: list[Tensor] = []
    stock = functional.dropout

    def watched(given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        dropped = stock(given, p, training, inplace)
        if training and p > 0:
            masks.append((dropped != 0) | (given == 0))
        return dropped

    before = torch.get_rng_state()
    with patch.object(functional, "dropout", watched):
        losses = [float(model.forward_backward(batch)) for batch in given]
    return Seen(losses, outputs, masks, held(model), torch.equal(before, torch.get_rng_state()))


def observed(case: Case, given: Sequence[dict[str, Tensor]] | None = None, seed: int = 0) -> list[Seen]:
    """All ranks of the case's plan, on its own batches or the given ones."""
    found: list[Seen] = ranks(case.devices).run(
        observe, case, plan_for(case), first_weights(case), given or batches(case), seed
    )
    return found


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Of dp2-tp2 on four ranks: 0 and 1 hold the same rows, 2 and 3 the others


def disagreement(found: Sequence[Seen]) -> str | None:
    """The layer after which tensor-parallel ranks have different activations, if there is one."""
    for number, (ours, theirs) in enumerate(zip(found[0].outputs, found[1].outputs, strict=True)):
        if not equal(ours, theirs):
            return f"layer {number} gives different activations on ranks of the same rows"
    return None


def drawn_alike(found: Sequence[Seen]) -> str | None:
    """An attention map, of which each rank has its own heads, that two tensor-parallel ranks drop alike."""
    maps = [place for place, mask in enumerate(found[0].masks) if mask.ndim == 4 and mask.shape[2] == mask.shape[3]]
    assert maps
    for place in maps:
        if torch.equal(found[0].masks[place], found[1].masks[place]):
            return f"dropout {place} drops the same of different heads"
    return None


def shared_by_rows(found: Sequence[Seen]) -> str | None:
    """A dropout that drops the same of different rows."""
    for place, (ours, theirs) in enumerate(zip(found[0].masks, found[2].masks, strict=True)):
        if torch.equal(ours, theirs):
            return f"dropout {place} drops the same of different rows"
    return None
