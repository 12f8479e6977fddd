"""Each family of models under mixed plans trains as its stock model does in a single process."""

from __future__ import annotations

import pytest
from oracle import Case
from parity import check
from small_models import IMAGES, LAYERS, TOKENS, config

_KINDS = ["tp2-dp2", "sdp4", "dp2-tp2+rc", "dp4+zero2", "tp4", "dp2-sdp2", "sdp2-tp2"]
"""Every kind, in neighbours that all differ in layout or sharding."""
_PAIRS = ["tp2", "sdp2+rc", "dp2", "tp2+rc", "dp2+zero2", "sdp2", "tp2"]


def _padded(family: str) -> bool:
    return family not in IMAGES


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("shift", [0, 3])
def test_one_stage_of_all_kinds(family: str, shift: int) -> None:
    kinds = _KINDS[shift:] + _KINDS[:shift]
    stages = [[kinds[place] for place in range(LAYERS[family])]]
    check(Case(config=config(family), stages=stages, micro_batches=2, clip=0.5, padding=_padded(family)))


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize(("schedule", "first"), [("1f1b", 1), ("gpipe", 3)])
def test_two_uneven_stages(family: str, schedule: str, first: int) -> None:
    kinds = _PAIRS[: LAYERS[family]]
    stages = [kinds[:first], kinds[first:]]
    check(
        Case(
            config=config(family), stages=stages, micro_batches=4, schedule=schedule, clip=0.5, padding=_padded(family)
        )
    )


@pytest.mark.parametrize("family", LAYERS)
def test_a_stage_for_each_device(family: str) -> None:
    """Every boundary inside the model that four stages can have; more micro-batches than stages."""
    each = [1, 1, 1, 1] if LAYERS[family] == 4 else [2, 2, 2, 1]
    stages = [["single"] * count for count in each]
    check(Case(config=config(family), stages=stages, batch=12, micro_batches=6, padding=_padded(family)))


_SEQUENCE = {
    "bert": ["tp4", "tp4+sp", "dp2-tp2+sp+rc", "tp4+sp"],
    "gpt2": ["tp2-dp2", "tp4+sp", "sdp2-tp2+sp", "dp2-tp2+sp"],
    "llama": ["sdp4", "tp4+sp+rc", "tp4+sp", "tp2-sdp2+sp"],
    "t5": ["tp4", "tp4+sp", "tp2-dp2+sp+rc", "tp4", "tp4+sp", "dp2-tp2+sp+rc", "tp4+sp"],
}


@pytest.mark.parametrize("family", TOKENS)
def test_sequence_parallelism(family: str) -> None:
    """Beside layers with other rows, and of other degrees."""
    check(Case(config=config(family), stages=[_SEQUENCE[family]], micro_batches=2, clip=0.5, padding=True))


@pytest.mark.parametrize("family", TOKENS)
def test_sequence_parallelism_across_stages(family: str) -> None:
    """Divided on both sides of the boundary."""
    sequence = ["tp2" if place in (0, 3) and family == "t5" else "tp2+sp" for place in range(LAYERS[family])]
    stages = [["tp2", *sequence[1:2]], [*sequence[2:-1], "dp2"]]
    check(Case(config=config(family), stages=stages, micro_batches=2, clip=0.5, padding=True))


@pytest.mark.parametrize("first", [1, 2, 4, 5, 6])
def test_every_cut_of_an_encoder_decoder(first: int) -> None:
    """T5 carries one tensor between encoders and two between decoders; tables of both stacks may be in both stages."""
    kinds = ["tp2", "sdp2", "tp2+sp", "dp2", "tp2+sp+rc", "sdp2", "tp2"]
    stages = [kinds[:first], kinds[first:]]
    check(Case(config=config("t5"), stages=stages, micro_batches=2, clip=0.5, padding=True, steps=2))
