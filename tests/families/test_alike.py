"""Which blocks are watched once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from galvatron.core.spec import Training
from galvatron.families.build import without_weights
from galvatron.families.generic import tensor_rules
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.alike import outline_of
from galvatron.families.generic.stubs import Call
from galvatron.runtime.split_trial import split_difference


class _Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.shares = heads, (0.5, 0.5)
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        made: Tensor = self.down(self.up(hidden)) * scale
        return made


def _outline(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return outline_of(block, Call(0, (torch.ones(2, 3, 8), *args), kwargs))


def test_copies_are_alike_whatever_their_weights() -> None:
    block = _Block()
    assert _outline(block) == _outline(_Block()) == _outline(without_weights(block).eval())


@pytest.mark.parametrize(
    "other",
    [
        lambda: _outline(_Block(width=16)),
        lambda: _outline(_Block(heads=4)),
        lambda: _outline(_Block(), 2.0),
        lambda: _outline(_Block(), scale=1.0),
        lambda: outline_of(_Block(), Call(0, (torch.ones(2, 4, 8),), {})),
        lambda: _outline(nn.Sequential(_Block())),
    ],
)
def test_what_may_differ_is_told_apart(other: Callable[[], Any]) -> None:
    assert other() != _outline(_Block())


def test_a_configuration_says_more_than_its_text() -> None:
    """How attention is computed is in no text of it."""
    blocks = [_llama(attention).model.layers[0] for attention in ("eager", "sdpa", "sdpa")]
    eager, fused, again = (_outline(block) for block in blocks)
    assert fused == again != eager


def test_a_class_that_is_patched_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels are put in the place of a model's own."""
    before = _outline(_Block())
    monkeypatch.setattr(_Block, "forward", lambda self, hidden, scale=1.0: hidden)
    assert _outline(_Block()) != before


def test_functions_are_told_apart() -> None:
    found = []
    for function in (nn.functional.relu, nn.functional.softmax, nn.functional.relu):
        block = _Block()
        block.act = function  # type: ignore[assignment]
        found.append(_outline(block))
    assert found[0] == found[2] != found[1]


def test_a_split_is_tried_again_where_a_class_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, training = _llama(), Training(dropout=False)
    model.config.architectures = ["LlamaForCausalLM"]
    assert split_difference(model, training) is None
    forward = LlamaMLP.forward

    def normed(self: Any, hidden: Tensor) -> Any:
        """Of all features, of which a rank has some."""
        inside = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(inside - inside.mean(-1, keepdim=True))

    monkeypatch.setattr(LlamaMLP, "forward", normed)
    assert split_difference(model, training) is not None
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert split_difference(model, training) is None


@pytest.mark.parametrize("changed", ["a hook", "a forward"])
def test_who_was_changed_is_like_no_other(changed: str) -> None:
    block = _Block()
    if changed == "a hook":
        block.up.register_forward_hook(lambda *_: None)
    else:
        block.up.forward = lambda hidden: hidden  # type: ignore[assignment]
    assert _outline(block) is None


def _llama(attention: str = "sdpa") -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config: Any = LlamaConfig
    kind: Any = LlamaForCausalLM
    return kind._from_config(config(**sizes, num_hidden_layers=2, num_key_value_heads=2), attn_implementation=attention)


def test_a_second_model_of_the_same_blocks_is_not_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []
    run = tensor_rules._watched

    def noted(runs: Any, said: Any) -> Any:
        watched.append(runs)
        return run(runs, said)

    monkeypatch.setattr(tensor_rules, "_watched", noted)
    monkeypatch.setattr(tensor_rules, "_FOUND", {})
    first, second = Generic(_llama()), Generic(_llama())
    assert first.tensor_rules == second.tensor_rules
    assert len(watched) == 1
    hooked = _llama()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    Generic(hooked)
    assert len(watched) == 2
