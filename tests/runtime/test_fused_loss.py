"""The loss in chunks, without its logits, trains as the stock model's own loss does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from longer import longer
from oracle import Case
from parity import check, plan_for
from ranks import ranks
from small_models import LAYERS, config
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from galvatron import InvalidInput
from galvatron.core.spec import LOSS_CHUNK_CELLS
from galvatron.runtime import fused_loss
from galvatron.runtime.tensor_parallel.vocabulary import Smoothing


def _case(family: str, *stages: list[str], dtype: torch.dtype = torch.float64, **options: object) -> Case:
    layers = {} if family == "t5" else {"num_hidden_layers": sum(map(len, stages)) - 2}
    return Case(config=config(family, **layers, **options), stages=list(stages), dtype=dtype, clip=0.5)


@pytest.mark.parametrize(
    "case",
    [
        _case("llama", ["tp2", "tp2", "tp2+fl"]),
        _case("llama", ["dp2", "sdp2", "sdp2+fl"], tie_word_embeddings=True),
        replace(_case("bert", ["single"] * 2, ["single", "single+fl"]), micro_batches=4, padding=True),
        longer(_case("llama", ["tp2", "tp2+sp", "tp2+fl+sp"], tie_word_embeddings=True)),
        longer(_case("gpt2", ["sdp2", "tp2", "dp2", "dp2+fl+zero2"])),
        longer(_case("gpt2", ["dp2", "dp2", "dp2", "tp2+fl"], dtype=torch.float32)),
        longer(_case("t5", ["dp2"] * (LAYERS["t5"] - 1) + ["tp2+fl"])),
        longer(replace(_case("bert", ["tp4"] * 3 + ["tp4+fl"]), padding=True)),
    ],
    ids=lambda case: f"{case.config['model_type']}: {case.stages}",
)
def test_trains_as_one_process(case: Case) -> None:
    check(case)


def test_only_where_logits_go_into_the_loss_alone() -> None:
    with pytest.raises(InvalidInput, match="layer 1"):
        plan_for(_case("llama", ["dp2", "dp2+fl", "dp2"]))
    with pytest.raises(InvalidInput, match="exclude each other"):
        plan_for(_case("llama", ["dp2", "dp2", "dp2+fl+rc"]))


@pytest.mark.parametrize("words", [1, 30_522, 128_256, 2**20 - 1, 2**24, 2**29])
def test_chunks_are_whole_tiles_of_at_most_so_many_logits(words: int) -> None:
    rows = fused_loss._rows(words)
    assert rows == 1 or rows * words <= LOSS_CHUNK_CELLS < 2 * max(rows, 256) * words
    assert rows <= 256 or rows % 256 == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cells", [1, 50, 10**6])
@pytest.mark.parametrize("chunk", [fused_loss._whole, fused_loss._compiled])
@pytest.mark.parametrize("filled", [False, True])
def test_any_chunk_gives_what_torch_gives(
    dtype: torch.dtype, cells: int, chunk: Any, filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored targets count nothing, whatever the number of tokens at a time, and words are filled up or not."""
    monkeypatch.setattr(fused_loss, "LOSS_CHUNK_CELLS", cells)
    monkeypatch.setattr(fused_loss, "_WANT_ALIGNED", {"cpu"} if filled else {})
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    )
    labels = torch.tensor([3, -100, 10, 0, -100, 7, 7])
    known = functional.cross_entropy(
        functional.linear(hidden, weight, bias).to(torch.promote_types(dtype, torch.float32)), labels, reduction="sum"
    )
    own = fused_loss._FusedCrossEntropy.apply(hidden, weight, bias, labels, chunk)  # type: ignore[no-untyped-call]
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(own, known, rtol=bound, atol=bound)
    for expected, found in zip(
        torch.autograd.grad(known / 3, (hidden, weight, bias)),
        torch.autograd.grad(own / 3, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("words", "dtype", "filled"),
    [(11, torch.bfloat16, 64), (8, torch.bfloat16, 8), (67, torch.float32, 128), (68, torch.float32, 68)],
)
def test_words_are_filled_up_where_rows_would_not_be_aligned(
    words: int, dtype: torch.dtype, filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = torch.ones(words, 5, dtype=dtype), torch.ones(words, dtype=dtype)
    assert fused_loss._filled(weight) is weight, "CPUs do not mind"
    monkeypatch.setattr(fused_loss, "_WANT_ALIGNED", {"cpu"})
    for own in (weight, bias):
        found = fused_loss._filled(own)
        assert found.shape == (filled, *own.shape[1:])
        assert torch.equal(found[:words], own)
        assert not found[words:].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_split_vocabulary_that_is_filled_up_gives_what_torch_gives(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    )
    labels = torch.tensor([3, -100, 10, 0, -100, 7, 7])
    loss = functional.cross_entropy(
        functional.linear(hidden, weight, bias), labels, reduction="sum", label_smoothing=smoothing
    )
    by_hidden, by_weight, by_bias = torch.autograd.grad(loss, (hidden, weight, bias))
    given = [own.detach() for own in (hidden, weight, bias)]
    parts = ranks(2).run(_split_loss, *given, labels, smoothing)
    for own in parts:
        torch.testing.assert_close(own[0], loss.detach(), rtol=1e-12, atol=1e-12)
    whole = parts[0][1] + parts[1][1], *(torch.cat([parts[0][at], parts[1][at]]) for at in (2, 3))
    torch.testing.assert_close(whole, (by_hidden, by_weight, by_bias), rtol=1e-12, atol=1e-12)


def _split_loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float) -> list[Tensor]:
    words = range(0, 6) if dist.get_rank() == 0 else range(6, 11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_loss, "_WANT_ALIGNED", {"cpu"})
        inputs = [
            own.clone().requires_grad_()
            for own in (hidden, weight[words.start : words.stop], bias[words.start : words.stop])
        ]
        group, smooth = dist.distributed_c10d._get_default_group(), Smoothing(smoothing, len(weight))
        chunk = partial(fused_loss._split, words=words, group=group, smoothing=smooth)
        loss = fused_loss._FusedCrossEntropy.apply(*inputs, labels, chunk)  # type: ignore[no-untyped-call]
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]
