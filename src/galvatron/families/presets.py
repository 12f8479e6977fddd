"""Models by name: the paper's (Table 1 and Section 5.5), well-known ones, and tiny ones to try things with."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Protocol

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.bert.facts import Bert
from galvatron.families.gpt2.facts import Gpt2
from galvatron.families.llama.facts import Llama
from galvatron.families.swin.facts import Swin
from galvatron.families.t5.facts import T5
from galvatron.families.vit.facts import Vit

__all__ = ["Architecture", "find_preset", "preset_names"]


class Architecture(Protocol):
    """Hyper-parameters of some family."""

    def spec(self, name: str, training: Training) -> ModelSpec:
        """The model's layers when trained this way."""


def _bert_huge(depth: int) -> Bert:
    return Bert(hidden=1280, layers=depth, heads=16, inner=5120)


def _vit_huge(depth: int) -> Vit:
    return Vit(hidden=1280, layers=depth, heads=16, inner=5120)


def _t5_large(depth: int) -> T5:
    if depth % 2:
        raise InvalidInput(f"t5-large-{depth}: half of the layers are decoders, so {depth} must be even")
    return T5(hidden=1024, encoders=depth // 2, decoders=depth // 2, heads=16, inner=4096)


def _swin_huge(depth: int) -> Swin:
    if depth < 7:
        raise InvalidInput(f"swin-huge-{depth}: three stages have 2 layers each, so the depth must be at least 7")
    # The paper runs 8-way TP on every stage, so 8 must divide the heads of the first (10, as the width suggests, does
    # not).
    return Swin(hidden=320, depths=(2, 2, depth - 6, 2), heads=(8, 16, 32, 64))


_llama2 = partial(Llama, positions=4096, norm_epsilon=1e-5)
_llama3 = partial(Llama, vocabulary=128256, positions=8192, rope_theta=500_000.0, norm_epsilon=1e-5)

_BY_DEPTH: dict[str, Callable[[int], Architecture]] = {
    "bert-huge": _bert_huge,
    "vit-huge": _vit_huge,
    "t5-large": _t5_large,
    "swin-huge": _swin_huge,
}
"""Models the paper varies in depth: "bert-huge-32", "bert-huge-48", and any other number of layers."""
_PAPER_DEPTHS = (32, 48)

_PRESETS: dict[str, Architecture] = {
    # Heads and patch size are not in the paper: these fit its activation sizes.
    "bert-xhuge": Bert(hidden=2560, layers=128, heads=32, inner=10240),
    "vit-xhuge": Vit(hidden=2560, layers=128, heads=32, inner=10240),
    "bert-base": Bert(),
    "bert-large": Bert(hidden=1024, layers=24, heads=16, inner=4096),
    "vit-base": Vit(),
    "vit-large": Vit(hidden=1024, layers=24, heads=16, inner=4096),
    "t5-base": T5(hidden=768, encoders=12, decoders=12, heads=12, inner=3072),
    "t5-large": _t5_large(48),
    "swin-base": Swin(hidden=128, depths=(2, 2, 18, 2), heads=(4, 8, 16, 32)),
    "swin-large": Swin(hidden=192, depths=(2, 2, 18, 2), heads=(6, 12, 24, 48)),
    "gpt2": Gpt2(),
    "gpt2-medium": Gpt2(hidden=1024, layers=24, heads=16),
    "gpt2-large": Gpt2(hidden=1280, layers=36, heads=20),
    "gpt2-xl": Gpt2(hidden=1600, layers=48, heads=25),
    "gpt3-6.7b": Gpt2(hidden=4096, layers=32, heads=32, positions=2048),
    "gpt3-13b": Gpt2(hidden=5120, layers=40, heads=40, positions=2048),
    "gpt3-175b": Gpt2(hidden=12288, layers=96, heads=96, positions=2048),
    "llama2-7b": _llama2(),
    "llama2-13b": _llama2(hidden=5120, layers=40, heads=40, inner=13824),
    "llama2-70b": _llama2(hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672),
    "llama3-8b": _llama3(kv_heads=8, inner=14336),
    "llama3-70b": _llama3(hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672),
    "bert-tiny": Bert(hidden=128, layers=2, heads=2, inner=512),
    "gpt2-tiny": Gpt2(hidden=128, layers=2, heads=2, positions=128),
    "llama-tiny": Llama(hidden=128, layers=2, heads=4, kv_heads=2, inner=352, vocabulary=1000, positions=128),
    "t5-tiny": T5(hidden=128, encoders=2, decoders=2, heads=4, head_dim=32, inner=512, positions=128),
    "vit-tiny": Vit(hidden=192, layers=4, heads=3, inner=768, image=(64, 64), labels=10),
    "swin-tiny-demo": Swin(hidden=32, depths=(2, 2), heads=(2, 4), image=(112, 112), labels=10),
}


def find_preset(name: str) -> Architecture | None:
    """The preset of this name, or None."""
    if name in _PRESETS:
        return _PRESETS[name]
    match = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})", name)
    if match is None or match[1] not in _BY_DEPTH:
        return None
    return _BY_DEPTH[match[1]](int(match[2]))


def preset_names() -> tuple[str, ...]:
    """Every preset, the paper's first; those with a depth in their name exist for other depths too."""
    return (*(f"{stem}-{depth}" for stem in _BY_DEPTH for depth in _PAPER_DEPTHS), *_PRESETS)
