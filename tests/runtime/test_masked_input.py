"""Models that mask their input in training (SpecAugment): in place, by numbers of NumPy's generator.

What would break: a recomputed layer that masks by other numbers has gradients of another forward; a mask written into
one micro-batch spoils what earlier ones keep for backward; a user's own generator goes on as if nothing had been drawn.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from oracle import Case, batches
from parity import plan_for
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

import galvatron
from galvatron.core.spec import Attention, Training
from galvatron.families.build import without_weights
from galvatron.families.registry import layered_model
from galvatron.runtime.drawing import draws_on_host
from galvatron.runtime.pipeline import run
from galvatron.runtime.randomness import LayerRandomness
from galvatron.runtime.unpriced import facts_of, unpriced

_FRAMES, _MELS, _WORDS, _STEPS = 32, 8, 40, 2
_TRAINING = Training(dropout=False, attention=Attention.EAGER, sequence_length=16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _SIDES.items()}
    config = WhisperConfig(
        vocab_size=_WORDS, d_model=16, num_mel_bins=_MELS, max_source_positions=_FRAMES // 2, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0, apply_spec_augment=True,
        mask_time_prob=0.3, mask_time_length=4, mask_feature_prob=0.3, mask_feature_length=2, **sizes,
    )  # fmt: skip
    model: nn.Module = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
    return model


_SIDES: dict[str, Any] = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    heard = torch.randn(8, _MELS, _FRAMES, generator=generator)
    return {"input_features": heard, "labels": torch.randint(3, _WORDS, (8, 6), generator=generator)}


def _plan(*stages: list[str]) -> galvatron.Plan:
    layered = layered_model(without_weights(_model()))
    plan = unpriced(facts_of(layered, _TRAINING, "whisper"), stages)
    return replace(plan, batch=8)


def _trained(plan: galvatron.Plan) -> tuple[list[float], dict[str, Tensor], list[Any], bool]:
    """On a rank: losses, the last gradients, the masks drawn, and whether the user's numbers stayed as they were."""
    model = galvatron.parallelize(_model(), plan, dtype=torch.float64, device="cpu", check=False)
    drawn: list[Any] = []
    stock = np.random.choice

    def watched(*given: Any, **more: Any) -> Any:
        drawn.append(stock(*given, **more).tolist())
        return np.array(drawn[-1])

    np.random.seed(5)
    random.seed(5)
    np.random.choice = watched
    try:
        losses = [float(model.forward_backward(_batch())) for _ in range(_STEPS)]
    finally:
        np.random.choice = stock
    after = np.random.rand(), random.random()
    untouched = np.random.RandomState(5).rand(), random.Random(5).random()
    return losses, dict(model.whole_gradients()), drawn, after == untouched


def test_what_is_recomputed_masks_the_same() -> None:
    plain, again = (ranks(2).run(_trained, _plan([f"dp2{grade}"] * 5)) for grade in ("", "+rc"))
    for (losses, gradients, _, kept), (_, recomputed, _, _) in zip(plain, again, strict=True):
        assert kept
        assert losses[0] != losses[1], "the same batch, masked anew"
        for name, gradient in gradients.items():
            torch.testing.assert_close(recomputed[name], gradient, msg=name)
    (_, _, first, _), (_, _, second, _) = plain
    assert first
    assert first != second, "ranks that hold other rows mask for themselves"
    quarters = [first[len(first) * part // 4 : len(first) * (part + 1) // 4] for part in range(4)]
    assert all(one != other for one, other in pairwise(quarters)), "micro-batches and iterations draw anew"


def test_micro_batches_in_flight_keep_their_own_masks() -> None:
    (one,) = ranks(1).run(_trained, replace(_plan(["single"] * 5), micro_batches=4))
    found = ranks(2).run(_trained, replace(_plan(["single"] * 2, ["single"] * 3), micro_batches=4, schedule="gpipe"))
    for losses, gradients, _, _ in found:
        assert losses == pytest.approx(one[0])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, one[1][name], msg=name)


def test_other_threads_draw_on() -> None:
    """Their numbers are not taken back while a layer runs that is known to draw none."""
    quiet = LayerRandomness(
        device=torch.device("cpu"), seed=0, layer=1, rows=0, tensor=0, sequence=False, needed=False
    )  # fmt: skip
    np.random.seed(5)
    expected = np.random.RandomState(5).rand(2).tolist()
    quiet.begin((0, 0))
    with quiet.watched():
        pass
    quiet.end()
    found = []
    for step in range(2):
        quiet.begin((step, 0))
        with quiet.watched():
            found.append(np.random.rand())
        quiet.end()
    assert found == expected


def _beside(case: Case, plan: galvatron.Plan) -> list[float]:
    """On a rank: what is drawn between layers while the model trains, as a loader's thread would."""
    model = galvatron.parallelize(None, plan, device="cpu")
    drawn: list[float] = []
    stock = run.Pipeline._let_go

    def let_go(pipeline: run.Pipeline) -> None:
        drawn.append(np.random.rand())
        stock(pipeline)

    np.random.seed(5)
    with patch.object(run.Pipeline, "_let_go", let_go):
        for batch in batches(case):
            model.forward_backward(batch)
    return drawn


def test_an_iteration_takes_back_no_numbers() -> None:
    case = Case(config=config("gpt2"), stages=[["single"] * 4], batch=2, micro_batches=2)
    (drawn,) = ranks(1).run(_beside, case, plan_for(case))
    assert len(drawn) == 4 * case.steps, "forward and backward of two micro-batches"
    assert drawn == np.random.RandomState(5).rand(len(drawn)).tolist()


class _Late(nn.Module):
    """Masks later in training."""

    def forward(self, hidden: Tensor, step: int) -> Tensor:
        return self._masked(hidden) if step > 1000 else hidden

    def _masked(self, hidden: Tensor) -> Tensor:
        return hidden * float(np.random.rand() < 0.5)


def test_what_draws_later_is_seen_in_its_code() -> None:
    assert draws_on_host([_Late()])
    assert not draws_on_host(_model().get_submodule("model.decoder").modules())
