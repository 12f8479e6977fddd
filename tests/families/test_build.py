"""Models without weights: nothing on the CPU but buffers, which are the stock model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from stock_models import CONFIGS
from torch import nn

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.families import build
from galvatron.families.build import build_meta, without_weights


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_on_meta_and_buffers_are_right(name: str) -> None:
    config = CONFIGS[name]()
    state = torch.get_rng_state()
    model: Any = build_meta(config, Training())
    assert torch.equal(torch.get_rng_state(), state)
    stock = type(model)(config)
    assert {key: own.shape for key, own in model.named_parameters(remove_duplicate=False)} == {
        key: own.shape for key, own in stock.named_parameters(remove_duplicate=False)
    }
    assert all(own.is_meta for own in model.parameters())
    assert len(list(model.parameters())) == len(list(stock.parameters())), "tied weights stay tied"
    torch.testing.assert_close(dict(model.named_buffers()), dict(stock.named_buffers()), rtol=0, atol=0)


class _Filled(transformers.LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("constant", nn.init.constant_(torch.zeros(3), 2.0))
        self.register_buffer("drawn", nn.init.uniform_(torch.zeros(3), 4.0, 5.0))
        self.register_buffer("put_in", torch.zeros(3).fill_(6.0))


def test_what_fills_buffers_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what would fill a parameter, which has no memory, is left out."""
    monkeypatch.setattr(vars(build)["transformers"], "LlamaForCausalLM", _Filled)
    model: Any = build_meta(CONFIGS["llama"](), Training())
    assert model.constant.tolist() == [2.0] * 3
    assert model.drawn.min() >= 4
    assert model.put_in.tolist() == [6.0] * 3


@pytest.mark.parametrize(
    ("attention", "expected"), [(Attention.FUSED, "sdpa"), (Attention.EAGER, "eager"), (Attention.PAPER, "eager")]
)
def test_attention(attention: Attention, expected: str) -> None:
    model: Any = build_meta(CONFIGS["bert"](), Training(attention=attention))
    assert model.config._attn_implementation == expected
    assert model.bert.encoder.layer[0].attention.self.config._attn_implementation == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_can_be_turned_off(name: str) -> None:
    config = CONFIGS[name]()
    for field in [field for field in vars(config) if field.endswith(("dropout_prob", "pdrop", "dropout_rate"))]:
        setattr(config, field, 0.25)

    def active(model: nn.Module) -> bool:
        held = {vars(module).get(field, 0) for module in model.modules() for field in ("attention_dropout", "dropout")}
        return any(module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)) or held > {0}

    assert active(build_meta(config, Training())) or name.startswith("llama")
    assert not active(build_meta(config, Training(dropout=False)))
    assert active(build_meta(config, Training(dropout=True))) or name.startswith("llama")


def test_from_the_content_of_a_file() -> None:
    model: Any = build_meta(
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 30, "dtype": "bfloat16"},
        Training(),
    )
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert len(model.transformer.h) == 1
    assert model.lm_head.weight.dtype == torch.float32
    assert not model.config.use_cache


def test_other_families_by_their_architecture() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    content = {"model_type": "mistral", **sizes, "intermediate_size": 8, "vocab_size": 20}
    model = build_meta({**content, "architectures": ["MistralForCausalLM"]}, Training())
    assert type(model).__name__ == "MistralForCausalLM"
    with pytest.raises(InvalidInput, match="architectures is empty"):
        build_meta(content, Training())
    with pytest.raises(InvalidInput, match="'MistralForNothing'"):
        build_meta({**content, "architectures": ["MistralForNothing"]}, Training())


def test_attention_that_a_model_does_not_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def attention() -> str:
        model: Any = build_meta(CONFIGS["bert"](), Training())
        return str(model.config._attn_implementation)

    assert attention() == "sdpa"
    assert not caplog.records
    monkeypatch.setattr(transformers.BertForMaskedLM, "_supports_sdpa", False)
    assert attention() == "eager"
    assert "BertForMaskedLM has no fused attention" in caplog.text


def test_a_configuration_that_builds_no_model() -> None:
    """Whatever transformers raises (a None that is multiplied, a missing key), the user reads which model and what."""
    config = transformers.AutoConfig.for_model("dots1")  # its default number of experts is None
    config.architectures = ["Dots1ForCausalLM"]
    with pytest.raises(InvalidInput, match=r"Dots1ForCausalLM: transformers .* cannot build it .*\(TypeError: "):
        build_meta(config, Training())
    with pytest.raises(InvalidInput, match=r"gpt2: transformers .* cannot build it from this configuration"):
        build_meta({"model_type": "gpt2", "n_embd": "wide"}, Training())


@pytest.mark.parametrize(("content", "message"), [({}, "no field model_type"), ({"model_type": "brt"}, "'brt'")])
def test_unknown_configurations(content: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_meta(content, Training())


def test_the_given_configuration_is_not_changed() -> None:
    config = CONFIGS["bert"]()
    build_meta(config, Training(dropout=False, attention=Attention.EAGER))
    assert config.hidden_dropout_prob == 0.1
    assert config._attn_implementation != "eager"


class _Copied(nn.Linear):
    """A module that is not copied by its fields alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copied:
        copied = _Copied(self.in_features, self.out_features, bias=False, device="meta")
        copied.weight = copy.deepcopy(self.weight, memo)
        return copied.train(self.training)


@pytest.mark.parametrize(
    "part",
    [nn.Linear(4, 4), nn.MultiheadAttention(4, 2), _Copied(4, 4, bias=False)],
    ids=lambda own: type(own).__name__,
)
def test_a_copy_without_weights_has_all_else_of_its_own(part: nn.Module) -> None:
    model: Any = nn.Sequential(part, nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model[1].settings = {"sizes": [1, 2], "of": part}
    hook = model[2].register_forward_hook(lambda *_: None)
    model[0].requires_grad_(False).eval()
    copied = without_weights(model, torch.bfloat16)
    assert [(name, type(own)) for name, own in copied.named_modules()] == [
        (name, type(own)) for name, own in model.named_modules()
    ]
    for (name, own), (other, given) in zip(copied.named_parameters(), model.named_parameters(), strict=True):
        assert (name, own.shape, own.requires_grad) == (other, given.shape, given.requires_grad)
        assert own.is_meta
        assert own.dtype == torch.bfloat16
    assert copied[2].weight is copied[1].weight
    assert copied[1].settings == {"sizes": [1, 2], "of": copied[0]}
    assert copied[1].settings["sizes"] is not model[1].settings["sizes"]
    assert not copied[0].training
    assert copied[1].training
    assert hook.id in copied[2]._forward_hooks
    copied[1].running_mean += 1
    copied[0].register_forward_hook(lambda *_: None)
    assert not model[1].running_mean.any()
    assert not model[0]._forward_hooks
