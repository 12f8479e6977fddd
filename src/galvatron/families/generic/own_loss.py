"""Which loss a stock model computes itself: found by running its own forward with labels, not by its name.

The logits in this trial are random and no weights are needed, so it takes milliseconds whatever the model's size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.adapters import count_targets, next_tokens
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import StubbedModel
from galvatron.families.layer import IGNORED, Batch, CrossEntropy

__all__ = ["refuse_balance_loss", "refuse_capacity", "refuse_layer_drop", "shifts_labels"]

_TOLERANCE = 1e-4


def shifts_labels(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool:
    """Whether the model's own loss compares each position with the *next* label (causal models) or with its own.

    A loss that is neither is refused: training with another one would go unnoticed. A model that computes none is
    compared with its labels as they are.
    """
    name = type(model).__name__
    if "labels" not in inspect.signature(model.forward).parameters or "labels" not in batch:
        return False
    labels = batch["labels"].clone()
    if labels.ndim > 1 and not labels.is_floating_point():
        labels[0, labels.shape[1] // 2] = IGNORED  # the two readings must agree on what does not count
    stubbed = StubbedModel(model, anatomy.lists, anatomy.units)
    stubbed.noise = torch.Generator().manual_seed(0)
    stubbed.on_block = lambda call: (
        anatomy.returned(call, torch.randn(anatomy.hidden(call).shape, generator=stubbed.noise))
        if call.block == anatomy.last
        else anatomy.passed(call)
    )
    own, logits = _own_loss(stubbed, anatomy, {**batch, "labels": labels}, name)
    if own is None:
        return False
    if logits is None:
        raise InvalidInput(f"{name}: returns a loss without logits; give a loss function of your own")
    if "attention_mask" in anatomy.inputs and "input_ids" in batch:
        _refuse_masked(stubbed, anatomy, {**batch, "labels": labels}, name)
    found = {shifted: _cross_entropy(logits, labels, shifted) for shifted in (True, False)}
    for shifted, value in found.items():
        if value is not None and abs(value - own) <= _TOLERANCE * max(1.0, abs(own)):
            return shifted
    readings = " or ".join(
        f"{value:.4f} ({'the next label' if shifted else 'the label'} of each position)"
        for shifted, value in found.items()
        if value is not None
    )
    raise InvalidInput(
        f"{name}: its own loss of a trial batch is {own:.4f}, but the cross-entropy of its logits is "
        f"{readings or 'not defined for such labels'}; give a loss function of your own"
    )


def refuse_capacity(model: nn.Module) -> None:
    """Experts that take only so many tokens of a batch: which ones they leave out depends on how it is divided."""
    config: Any = getattr(model, "config", None)
    capacity = getattr(config, "expert_capacity", None)
    if isinstance(capacity, int) and not isinstance(capacity, bool):
        raise InvalidInput(
            f"{type(model).__name__}: expert_capacity of its configuration is {capacity}, so its experts leave out "
            "tokens by counting those of a whole batch; divided over ranks it would be another model"
        )


def refuse_layer_drop(model: nn.Module) -> None:
    """Blocks that are left out at random: stages do not know of each other's choice, so here none ever is."""
    config: Any = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if "layerdrop" in name and isinstance(value, float) and value > 0:
            raise InvalidInput(
                f"{type(model).__name__}: {name} of its configuration is {value}, so it leaves out blocks at random, "
                "which is not done here; set it to 0, or train without dropout (--no-dropout)"
            )


def refuse_balance_loss(model: nn.Module) -> None:
    """A term of the loss that comes from inside the blocks, where nobody would compute it."""
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise InvalidInput(
            f"{type(model).__name__}: output_router_logits of its configuration is True, so its loss has a term for "
            "the balance of experts, which is not computed here; set it to False"
        )


def _own_loss(stubbed: StubbedModel, anatomy: Anatomy, batch: Batch, name: str) -> tuple[float | None, Tensor | None]:
    inputs = {**anatomy.pick(batch), "labels": batch["labels"]}
    stubbed.noise = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            output = stubbed.run(inputs, torch.float32, training=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInput(
            f"{name}: its own loss of a trial batch fails ({reason}); give an example batch with labels that fit it, "
            "or a loss function of your own"
        ) from None
    loss, logits = _field(output, "loss"), _field(output, "logits")
    return None if loss is None else float(loss), logits


def _field(output: Any, name: str) -> Tensor | None:
    found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def _refuse_masked(stubbed: StubbedModel, anatomy: Anatomy, batch: Batch, name: str) -> None:
    """The logits do not depend on the mask here, so neither may the loss."""
    mask = torch.ones_like(batch["input_ids"])
    losses = []
    for masked in (0, 1):
        mask[0, mask.shape[1] - masked :] = 0
        losses.append(_own_loss(stubbed, anatomy, {**batch, "attention_mask": mask.clone()}, name)[0])
    if losses[0] != losses[1]:
        raise InvalidInput(
            f"{name}: its own loss leaves out positions by attention_mask; give a loss function of your own that does, "
            f"and mark those positions in the labels with {IGNORED}"
        )


def _cross_entropy(logits: Tensor, labels: Tensor, shifted: bool) -> float | None:
    """The mean over the targets; None where labels and logits do not fit."""
    fits = labels.shape == logits.shape[:-1] and not labels.is_floating_point()
    if not fits or (shifted and labels.ndim < 2):
        return None
    chosen = next_tokens(labels) if shifted else labels
    return float(CrossEntropy()(logits, chosen)) / max(count_targets(chosen), 1)
