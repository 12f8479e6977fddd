"""Which loss a stock model computes itself: found by running its own forward with labels, not by its name.

The logits in this trial are random and no weights are needed, so it takes milliseconds whatever the model's size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.adapters import count_targets
from galvatron.families.context import next_tokens
from galvatron.families.generic.balance import Balance, asks_for_scores, collect_scores, give_scores
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import Call, StubbedModel
from galvatron.families.layer import IGNORED, Batch, CrossEntropy

__all__ = ["find_balance", "refuse_capacity", "refuse_layer_drop", "shifts_labels"]

_TOLERANCE = 1e-4
_ROUNDING = 1e-5
"""Of a loss in fp32."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k", "moe_top_k", "moe_k")
_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What models, or their configurations, call experts, how many a token chooses, and the weight of their balance."""


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


def find_balance(model: nn.Module, anatomy: Anatomy, batch: Batch, *, own_loss: bool) -> Balance | None:
    """The term for the balance of experts in the model's own loss; None: it has none.

    Its own forward is run with random scores of routers. A term that is not the usual one is refused, and any where the
    user gives another loss (``own_loss`` False), of which nobody knows whether it should have one.
    """
    if not asks_for_scores(model):
        return None
    name = type(model).__name__
    given = f"{name}: output_router_logits of its configuration is True, so its loss has a term for the balance of"
    if not own_loss:
        raise InvalidInput(f"{given} experts, which a loss function of your own does not get; set it to False")
    if len(anatomy.segments) > 1 or "labels" not in batch:
        raise InvalidInput(f"{given} experts, which is not known for such a model; set it to False")
    experts, chosen, weight = (_first(model, names) for names in (_COUNTS, _CHOSEN, _WEIGHTS))
    balance = Balance(int(experts or 2), int(chosen or 1), float(weight or 0.0))
    masks: list[Tensor | None] = [None]
    if "attention_mask" in anatomy.inputs and "input_ids" in batch:
        padded = torch.ones_like(batch["input_ids"])
        padded[0, padded.shape[1] // 2 :] = 0
        masks.append(padded)
    for mask in masks:
        own, ours = _balance_gap(model, anatomy, batch, balance, mask)
        if own == 0.0:
            return None
        if not abs(own - ours) <= _TOLERANCE * abs(ours) + _ROUNDING:
            raise InvalidInput(
                f"{given} experts, which changes by {own:.6f} between two trial batches, where {balance.chosen} of "
                f"{balance.experts} experts and the weight {balance.weight:g} make {ours:.6f}; such a term is not "
                "known, so set it to False"
            )
    return balance


def _first(model: Any, names: tuple[str, ...]) -> Any:
    """What the model says, or its configuration, or that of its text."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    places = (model, config, text)
    found = (getattr(place, name, None) for place in places for name in names)
    return next((own for own in found if isinstance(own, int | float) and not isinstance(own, bool)), None)


def _balance_gap(
    model: nn.Module, anatomy: Anatomy, batch: Batch, balance: Balance, mask: Tensor | None
) -> tuple[float, float]:
    """How far the losses of even and of uneven scores are apart, all else being equal: the model's own, and ours."""
    stubbed = StubbedModel(model, anatomy.lists, anatomy.units)
    collect_scores(stubbed.model, flag=True)
    batch = batch if mask is None else {**batch, "attention_mask": mask}
    rows, tokens = batch["labels"].shape[:2]
    own, ours = [], []
    for slope in (0.0, 3.0):
        generator = torch.Generator().manual_seed(1)
        tally = balance.start(rows, torch.empty(0))

        def block(call: Call, generator: torch.Generator = generator, slope: float = slope) -> Any:
            nonlocal tally
            scores = torch.randn(rows * tokens, balance.experts, generator=generator)
            scores = scores + slope * torch.arange(balance.experts)
            give_scores(scores)
            tally = balance.add(tally, [scores], mask)
            return anatomy.passed(call)

        stubbed.on_block = block
        own.append(_own_loss(stubbed, anatomy, batch, type(model).__name__)[0] or 0.0)
        ours.append(float(balance.term(tally, lambda known: known)))
    return own[1] - own[0], ours[1] - ours[0]


def _own_loss(stubbed: StubbedModel, anatomy: Anatomy, batch: Batch, name: str) -> tuple[float | None, Tensor | None]:
    inputs = {**anatomy.pick(batch), "labels": batch["labels"]}
    stubbed.noise = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            output = stubbed.run(inputs, torch.float32, training=False)
    except Exception as error:  # of whatever kind: it comes from the stock model's own forward
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
