"""How far bf16 training may be from training in fp32: about as far as a single process in bf16 is.

Every rounding of an activation, a working weight or a gradient to bf16 errs by up to 2⁻⁹ of it, whoever does it. A plan
changes where sums are rounded, not how many roundings there are, so its error must be of the size of the error of the
stock model trained in one process with bf16 working weights and fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from oracle import Case, Record, batches, single_process, stock_model, trained
from parity import Trained
from ranks import ranks
from torch import Tensor, nn

__all__ = ["excess"]

_OF_ALL = 1.25
"""Times the single process's error, of all gradients or of all updates together."""
_OF_ONE = 2.5
"""The same of one parameter's gradient: few numbers, so chance matters more."""
_OF_LOSS = 2.0**-9
"""Relative to the fp32 loss: logits are rounded, sums are not."""


def excess(case: Case, found: Sequence[Trained], make: Callable[[Any], nn.Module] = stock_model) -> str | None:
    """What is further from fp32 than it may be, if anything is. ``make``: a case's model, some of which may be
    frozen."""
    wide = replace(case, dtype=torch.float32)
    truth = single_process(wide) if make is stock_model else trained(wide, make(case))
    (single,) = ranks(1).run(_trained, case, make)  # in a process like the ranks', with the same matrix products
    start = {name: own.detach() for name, own in make(case).named_parameters()}
    frozen = {name for name, own in make(case).named_parameters() if not own.requires_grad}
    for rank, mine in enumerate(found):
        for ours, theirs in zip(mine.losses, truth.losses, strict=True):
            if abs(ours - theirs) > _OF_LOSS * theirs:
                return f"rank {rank}: loss {ours}, in fp32 {theirs}"
        for part in mine.held:
            held = torch.bfloat16 if part.name in frozen else torch.float32
            if part.value.dtype != held or part.gradient.dtype != held:
                return f"rank {rank}: {part.name} or its gradient is not in {held}"
    gradients, parameters = _whole(found, truth, "gradient"), _whole(found, truth, "value")
    for name in frozen:
        if not torch.equal(parameters.pop(name), start.pop(name).bfloat16().float()):
            return f"{name} is frozen, but has changed"
        del truth.parameters[name], single.parameters[name]
    for name, expected in truth.gradients.items():
        ours, theirs = (float((own[name] - expected).norm()) for own in (gradients, single.gradients))
        if ours > _OF_ONE * theirs + 1e-6:
            return f"gradient of {name}: off by {ours:.1e}, a single process by {theirs:.1e}"
    for what, own, other, exact in (
        ("gradients", gradients, single.gradients, truth.gradients),
        ("updates", parameters, single.parameters, truth.parameters),
    ):
        ours, theirs = _distance(own, exact), _distance(other, exact)
        if ours > _OF_ALL * theirs:
            return f"{what}: off by {ours:.1e}, a single process by {theirs:.1e}"
    if _distance(parameters, start) < 1e-3:
        return "the parameters did not move"
    return None


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return float(sum((first[name] - second[name]).square().sum() for name in second) ** 0.5)


def _whole(found: Sequence[Trained], like: Record, what: str) -> dict[str, Tensor]:
    """Put together from all ranks' parts."""
    whole = {name: torch.full(tensor.shape, torch.nan).flatten() for name, tensor in like.parameters.items()}
    for mine in found:
        for own in mine.held:
            whole[own.name][own.places] = getattr(own, what).float()
    return {name: tensor.view_as(like.parameters[name]) for name, tensor in whole.items()}


def _trained(case: Case, make: Callable[[Any], nn.Module]) -> Record:
    """The stock model in one process: bf16 working weights, fp32 masters."""
    model = make(case)
    masters = {name: nn.Parameter(own.detach().clone()) for name, own in model.named_parameters()}
    trains = [masters[name] for name, own in model.named_parameters() if own.requires_grad]
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trains, lr=case.learning_rate, eps=case.epsilon)
    gradients: dict[str, Tensor] = {}
    losses: list[float] = []
    for batch in batches(case):
        rounded = {name: own.bfloat16() if own.is_floating_point() else own for name, own in batch.items()}
        loss = model(**rounded).loss
        torch.autograd.backward(loss)
        for name, work in model.named_parameters():
            masters[name].grad = torch.zeros_like(masters[name]) if work.grad is None else work.grad.float()
        if not losses:
            gradients = {name: master.grad for name, master in masters.items() if master.grad is not None}
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, work in model.named_parameters():
                work.copy_(masters[name])
        losses.append(float(loss.detach()))
    return Record(losses, [], gradients, {name: master.detach() for name, master in masters.items()})
