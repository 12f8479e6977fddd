"""Smoothed labels train as transformers' Trainer does with its ``label_smoothing_factor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights, stock_model, trained
from parity import Trained, difference, plan_for, run
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

import galvatron
from galvatron import InvalidInput
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.families.smoothing import SmoothedCrossEntropy, smooth_labels
from galvatron.runtime import fused_loss

_SHARE = 0.1


def _train(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> Trained:
    model = galvatron.parallelize(
        None, plan, weights=folder, dtype=case.dtype, device="cpu", label_smoothing=_SHARE, check=False
    )
    return run(case, model, given)


def _smoothed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The Trainer's loss; of it, as it rounds to fp32, only the formula."""
    config: Any = model.config
    smoother: Any = LabelSmoother(_SHARE)
    output, shifted = model(**batch), config.model_type in ("llama", "gpt2")
    theirs = smoother(output, batch["labels"], shift_labels=shifted)
    logits, labels = output.logits, batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=_SHARE)
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-5, check_dtype=False)
    return loss


def _case(family: str, *stages: list[str]) -> Case:
    layers = {"num_hidden_layers": sum(map(len, stages)) - 2}
    return Case(config=config(family, **layers), stages=list(stages), clip=0.5)


@pytest.mark.parametrize(
    "case",
    [
        _case("llama", ["tp2", "tp2", "tp2+fl"]),
        replace(_case("bert", ["sdp2", "dp2", "tp2"]), padding=True),
        longer(_case("gpt2", ["dp2", "sdp2", "dp2", "dp2+fl"])),
        longer(_case("vit", ["dp2", "sdp2", "sdp2"])),
        longer(replace(_case("llama", ["single"] * 2, ["single", "single"]), micro_batches=4, padding=True)),
    ],
    ids=lambda case: f"{case.config['model_type']}: {case.stages}",
)
def test_trains_as_one_process(case: Case) -> None:
    found = ranks(case.devices).run(_train, case, plan_for(case), first_weights(case), batches(case))
    assert difference(case, found, trained(case, stock_model(case), _smoothed)) is None


@pytest.mark.parametrize("chunk", [fused_loss._whole, fused_loss._compiled, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_way_gives_what_torch_gives(chunk: object, dtype: torch.dtype) -> None:
    """Also where rows of logits are longer than there are words."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.tensor([3, -100, 10, 0, -100, 7, 7])
    wide = logits if dtype == torch.float64 else logits.float()
    known = functional.cross_entropy(wide, labels, reduction="sum", label_smoothing=0.3)
    (expected,) = torch.autograd.grad(known, logits, retain_graph=True)
    if chunk is None:
        own = SmoothedCrossEntropy(0.3)(logits, labels)
        (found,) = torch.autograd.grad(own * 2, logits)
        found = found / 2
    else:
        filled = functional.pad(logits.detach(), (0, 5), value=7.0)
        own, found = chunk(filled, labels, 11, smoothing=0.3)  # type: ignore[operator]
        assert not found[:, 11:].any()
        found = found[:, :11]
    bound = 1e-12 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(own, known, rtol=bound, atol=bound)
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_other_losses_are_refused() -> None:
    meta = build_meta(config("llama"), Case(config={}, stages=[]).training)
    layered = layered_model(meta)
    for share in (1.0, -0.1):
        with pytest.raises(InvalidInput, match=r"label-smoothing: .* expected a share from 0 to below 1"):
            smooth_labels(layered, share)
    layered.layers[-1].replace_module("loss", nn.MSELoss())
    with pytest.raises(InvalidInput, match="label-smoothing: the loss of this model is not its own cross-entropy"):
        smooth_labels(layered, 0.1)
    smooth_labels(layered, 0.0)
