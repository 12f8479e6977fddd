"""Each family of models under mixed plans trains as its stock model does in a single process."""

from __future__ import annotations

from typing import Any

import pytest
from longer import longer
from oracle import Case
from parity import check
from small_models import IMAGES, LAYERS, config

_KINDS = ["tp2-dp2", "sdp4", "dp2-tp2+rc", "dp4+zero2", "tp4", "dp2-sdp2", "sdp2-tp2"]
"""Every kind, in neighbours that all differ in layout or sharding."""
_PAIRS = ["tp2", "sdp2+rc", "dp2", "tp2+rc", "dp2+zero2", "sdp2", "tp2"]


def _check(family: str, stages: list[list[str]], **changes: Any) -> None:
    padding = family not in IMAGES
    check(Case(config=config(family), stages=stages, clip=0.5, padding=padding, steps=2, **changes))


@pytest.mark.parametrize(
    ("family", "shift"), [*((family, 0) for family in LAYERS), longer("swin", 3), longer("vit", 3)]
)
def test_one_stage_of_all_kinds(family: str, shift: int) -> None:
    kinds = _KINDS[shift:] + _KINDS[:shift]
    _check(family, [kinds[: LAYERS[family]]], micro_batches=2)


@pytest.mark.parametrize("family", [own if own in ("bert", "t5") else longer(own) for own in LAYERS])
def test_two_uneven_stages(family: str) -> None:
    _check(family, [_PAIRS[:1], _PAIRS[1 : LAYERS[family]]], micro_batches=4, schedule="1f1b")


@pytest.mark.parametrize("family", [own if own == "swin" else longer(own) for own in LAYERS])
def test_a_stage_for_each_device(family: str) -> None:
    """Every boundary inside the model that four stages can have; more micro-batches than stages."""
    each = [1, 1, 1, 1] if LAYERS[family] == 4 else [2, 2, 2, 1]
    _check(family, [["single"] * count for count in each], batch=12, micro_batches=6, schedule="gpipe")


_SEQUENCE = {
    "bert": ["tp4", "tp4+sp", "dp2-tp2+sp+rc", "tp4+sp"],
    "gpt2": ["tp2-dp2", "tp4+sp", "sdp2-tp2+sp", "dp2-tp2+sp"],
    "llama": ["sdp4", "tp4+sp+rc", "tp4+sp", "tp2-sdp2+sp"],
    "t5": ["tp4", "tp4+sp", "tp2-dp2+sp+rc", "tp4", "tp4+sp", "dp2-tp2+sp+rc", "tp4+sp"],
}


@pytest.mark.parametrize("family", ["bert", longer("gpt2"), longer("llama"), longer("t5")])
def test_sequence_parallelism(family: str) -> None:
    """Beside layers with other rows, and of other degrees."""
    _check(family, [_SEQUENCE[family]], micro_batches=2)


@pytest.mark.parametrize("family", [longer("bert"), "gpt2", longer("llama"), "t5"])
def test_sequence_parallelism_across_stages(family: str) -> None:
    """Divided on both sides of the boundary."""
    sequence = ["tp2" if place in (0, 3) and family == "t5" else "tp2+sp" for place in range(LAYERS[family])]
    _check(family, [["tp2", *sequence[1:2]], [*sequence[2:-1], "dp2"]], micro_batches=2)


@pytest.mark.parametrize("first", [longer(2), 4, longer(5)])
def test_cuts_of_an_encoder_decoder(first: int) -> None:
    """T5 carries one tensor between encoders and two between decoders; a table of biases may be in both stages."""
    kinds = ["tp2", "sdp2", "tp2+sp", "dp2", "tp2+sp+rc", "sdp2", "tp2"]
    _check("t5", [kinds[:first], kinds[first:]], micro_batches=2)
