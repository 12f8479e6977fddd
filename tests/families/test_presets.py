"""Presets against facts from outside: Hugging Face's parameter counts and the paper's Table 1."""

from __future__ import annotations

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import Attention, LayerSpec, ModelSpec, Precision, Training
from galvatron.core.units import MIB
from galvatron.families import load_model, model_names

PAPER = Training(precision=Precision.FP32, attention=Attention.PAPER)

# Counted from the models of transformers 5.22 on the meta device, tied weights once.
PARAMETERS = {
    "bert-huge-32": 671_079_482,
    "bert-huge-48": 985_918_522,
    "vit-huge-32": 632_199_400,
    "vit-huge-48": 947_038_440,
    "t5-large-32": 502_746_112,
    "t5-large-48": 737_668_096,
    "swin-huge-32": 701_253_272,
    "swin-huge-48": 1_016_178_840,
    "bert-xhuge": 10_156_638_522,
    "vit-xhuge": 10_075_631_080,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "swin-base": 87_768_224,
    "swin-large": 196_532_476,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "bert-tiny": 4_416_698,
    "gpt2-tiny": 6_846_080,
    "llama-tiny": 625_280,
    "t5-tiny": 5_031_680,
    "vit-tiny": 1_932_874,
    "swin-tiny-demo": 138_262,
}
OTHER_DEPTHS = {
    "bert-huge-96": 1_930_435_642,
    "vit-huge-64": 1_261_877_480,
    "t5-large-64": 972_590_080,
    "swin-huge-40": 858_716_056,
}

# The paper's Table 1: parameters in millions, activations of one sample in MiB.
TABLE_1 = {
    "bert-huge-32": (672, 3149.39),
    "bert-huge-48": (987, 4657.51),
    "bert-xhuge": (10_200, 24210.05),
    "vit-huge-32": (632, 646.5),
    "vit-huge-48": (947, 968.59),
    "vit-xhuge": (10_100, 5313.9),
    "t5-large-32": (502, 4119.66),
    "t5-large-48": (737, 6107.75),
    "swin-huge-32": (701, 726.59),
    "swin-huge-48": (1016, 1016.8),
}


def layer(model: ModelSpec, name: str) -> LayerSpec:
    return next(kind for kind in model.kinds if kind.name == name)


def test_every_named_model_is_counted_here() -> None:
    assert set(model_names()) == set(PARAMETERS)
    assert len(model_names()) == len(PARAMETERS)


@pytest.mark.parametrize("name", [*PARAMETERS, *OTHER_DEPTHS])
def test_parameters_are_hugging_faces(name: str) -> None:
    assert load_model(name, Training()).parameters == (PARAMETERS | OTHER_DEPTHS)[name]


@pytest.mark.parametrize("name", TABLE_1)
def test_the_papers_table_1(name: str) -> None:
    millions, mebibytes = TABLE_1[name]
    model = load_model(name, PAPER)
    assert model.parameters / 1e6 == pytest.approx(millions, rel=0.015)
    assert model.activation_bytes / MIB == pytest.approx(mebibytes, rel=0.03)


@pytest.mark.parametrize("name", ["bert-huge-32", "t5-large-32"])
def test_the_papers_head_works_on_five_and_a_half_logits(name: str) -> None:
    head = load_model(name, PAPER).layers[-1]
    vocabulary = 30522 if name.startswith("bert") else 32128
    assert head.transient_bytes == int(5.5 * 512 * vocabulary * 4)


def test_layers_come_in_order() -> None:
    assert [layer.name for layer in load_model("t5-tiny", Training()).layers] == [
        "embedding",
        "encoder",
        "encoder",
        "decoder_embedding",
        "decoder",
        "decoder",
        "head",
    ]
    swin = [layer.name for layer in load_model("swin-huge-32", Training()).layers]
    assert swin == ["embedding", *["stage1"] * 2, "merge1", *["stage2"] * 2, "merge2", *["stage3"] * 26, "merge3"] + [
        "stage4"
    ] * 2 + ["head"]


def test_bert_block_in_units() -> None:
    """16u + 1w eager, 4u of it replicated; dropout adds 0.5u + 1.25w; the paper has 16.5u + 3.25w and a mask."""
    u, w, statistics = 4 * 512 * 1280, 4 * 16 * 512 * 512, 16 * 512
    eager = Training(attention=Attention.EAGER, dropout=False)
    block = layer(load_model("bert-huge-32", eager), "encoder")
    assert block.activation_bytes == 16 * u + w + statistics
    assert block.replicated_activation_bytes == 4 * u + statistics
    block = layer(load_model("bert-huge-32", PAPER), "encoder")
    assert block.activation_bytes == 16.5 * u + 3.25 * w + w // 16 + statistics
    assert block.replicated_activation_bytes == 4.5 * u + w // 16 + statistics


def test_bf16_halves_what_crosses_layers() -> None:
    for name in model_names():
        wide, narrow = (
            load_model(name, Training(precision=precision)) for precision in (Precision.FP32, Precision.BF16)
        )
        for left, right in zip(wide.kinds, narrow.kinds, strict=True):
            assert left.boundary_bytes == 2 * right.boundary_bytes, (name, left.name)
            assert left.parameters == right.parameters


def test_tensor_parallelism_follows_megatron() -> None:
    t5 = load_model("t5-large-32", Training())
    tensor = 4 * 512 * 1024
    collectives = {
        kind.name: (parallel.forward_collectives, parallel.backward_collectives, parallel.message_bytes)
        for kind in t5.kinds
        if (parallel := kind.tensor_parallel) is not None
    }
    assert collectives == {
        "embedding": (1, 0, tensor),
        "encoder": (2, 2, tensor),
        "decoder_embedding": (1, 0, tensor),
        "decoder": (3, 4, tensor),
        "head": (0, 1, tensor),
    }
    assert {kind.name: kind.boundary_bytes // tensor for kind in t5.kinds} == {
        "embedding": 1,
        "encoder": 1,
        "decoder_embedding": 2,
        "decoder": 2,
        "head": 2,
    }
    llama = layer(load_model("llama3-70b", Training()), "decoder")
    assert llama.allows_tensor_parallel(8)
    assert not llama.allows_tensor_parallel(16)  # 64 heads, but only 8 key/value heads
    vit = load_model("vit-base", Training())
    for whole in (layer(vit, "embedding"), layer(vit, "head")):
        assert whole.tensor_parallel is None
        assert whole.replicated_parameters == whole.parameters
        assert whole.split_activation_bytes == 0


def test_sequences_are_divided_in_blocks_and_language_heads() -> None:
    """Everything between word embeddings and logits; not patches, windows or classes. ViT's 197 tokens never divide."""
    expected: dict[str, dict[str, tuple[int, ...]]] = {
        "bert-base": {"encoder": (512,), "head": (512,)},
        "gpt2": {"decoder": (1024,), "head": (1024,)},
        "llama3-8b": {"decoder": (8192,), "head": (8192,)},
        "t5-base": {"encoder": (512,), "decoder": (512,), "head": (512,)},
        "vit-base": {"encoder": (197,)},
        "swin-base": {},
    }
    for name, lengths in expected.items():
        kinds = load_model(name, Training()).kinds
        tensors = {kind.name: kind.tensor_parallel.sequence_divides for kind in kinds if kind.tensor_parallel}
        assert {kind: divides for kind, divides in tensors.items() if divides} == lengths
    short = layer(load_model("gpt2", Training(sequence_length=100)), "decoder")
    assert short.allows_sequence_parallel(4)
    assert not short.allows_sequence_parallel(8)
    assert not layer(load_model("gpt2", Training()), "embedding").allows_sequence_parallel(2)
    assert not layer(load_model("vit-base", Training()), "head").allows_sequence_parallel(2)


def test_sequence_length() -> None:
    assert load_model("llama3-8b", Training()).layers[0].boundary_bytes == 4 * 8192 * 4096
    short = load_model("gpt2", Training(sequence_length=128))
    assert short.layers[0].boundary_bytes == 4 * 128 * 768
    assert short.parameters == PARAMETERS["gpt2"]
    longer = load_model("t5-base", Training(sequence_length=2048))  # relative positions have no end
    assert longer.layers[0].boundary_bytes == 4 * 2048 * 768


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("bert-base", 513, "513 is too long: the model has 512 learned positions"),
        ("gpt2", 1025, "1025 is too long: the model has 1024 learned positions"),
        ("vit-base", 128, "the size of the image decides"),
        ("swin-base", 128, "the size of the image decides"),
    ],
)
def test_impossible_sequence_lengths(name: str, length: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}.*{message}"):
        load_model(name, Training(sequence_length=length))


@pytest.mark.parametrize(
    ("name", "message"),
    [("t5-large-31", "31 must be even"), ("swin-huge-6", "depth must be at least 7")],
)
def test_impossible_depths(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_model(name, Training())
