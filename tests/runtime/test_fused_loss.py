"""The loss in chunks, without its logits, trains as the stock model's own loss does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longer import longer
from oracle import Case
from parity import check, plan_for
from small_models import LAYERS, config
from torch.nn import functional

from galvatron import InvalidInput
from galvatron.runtime import fused_loss


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cells", [1, 50, 10**6])
@pytest.mark.parametrize("chunk", [fused_loss._whole, fused_loss._compiled])
def test_any_chunk_gives_what_torch_gives(
    dtype: torch.dtype, cells: int, chunk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored targets count nothing, whatever the number of tokens at a time."""
    monkeypatch.setattr(fused_loss, "LOSS_CHUNK_CELLS", cells)
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
