"""What stock Hugging Face models keep for backward, measured, against what the zoo says they do.

The oracle is autograd itself: every distinct storage it saves while a small model runs forward, parameters and buffers
aside. Two depths give the blocks' share and the rest's (embedding and head). Compiled blocks go through PyTorch's own
compiler up to the partitioner, which decides what they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from longer import longer

from galvatron.core.spec.model import Attention, ModelSpec, Precision, Training
from galvatron.measure.models import load_any_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 64
VOCABULARY = 500


@dataclass(frozen=True)
class Case:
    """A model class, and its configuration with a given number of the blocks in question."""

    block: str
    model: str
    configure: Callable[[int, float], Any]
    blocks: str
    """The list of them in the model."""
    image: int = 0


def _bert(layers: int, dropout: float) -> Any:
    return transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=192,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def _gpt2(layers: int, dropout: float) -> Any:
    return transformers.GPT2Config(
        n_embd=64,
        n_layer=layers,
        n_head=4,
        vocab_size=VOCABULARY,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def _llama(kv_heads: int, activation: str = "silu") -> Callable[[int, float], Any]:
    return lambda layers, dropout: transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=192,
        hidden_act=activation,
        vocab_size=VOCABULARY,
        attention_dropout=dropout,
        use_cache=False,
    )


def _t5(grow: str, projection: str = "relu") -> Callable[[int, float], Any]:
    return lambda layers, dropout: transformers.T5Config(
        d_model=64,
        d_kv=32,
        num_layers=layers if grow == "encoder" else 1,
        num_decoder_layers=layers if grow == "decoder" else 1,
        num_heads=4,
        d_ff=192,
        vocab_size=VOCABULARY,
        dropout_rate=dropout,
        feed_forward_proj=projection,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def _vit(layers: int, dropout: float) -> Any:
    return transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=64,
        patch_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=10,
    )


def _swin(layers: int, dropout: float) -> Any:
    return transformers.SwinConfig(
        image_size=112,
        embed_dim=32,
        depths=[layers, 1],
        num_heads=[2, 4],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=10,
    )


CASES = {
    "bert": Case("encoder", "BertForMaskedLM", _bert, "bert.encoder.layer"),
    "gpt2": Case("decoder", "GPT2LMHeadModel", _gpt2, "transformer.h"),
    "llama": Case("decoder", "LlamaForCausalLM", _llama(4), "model.layers"),
    "llama-grouped": Case("decoder", "LlamaForCausalLM", _llama(2), "model.layers"),
    "llama-relu": Case("decoder", "LlamaForCausalLM", _llama(4, "relu"), "model.layers"),
    "t5-encoder": Case("encoder", "T5ForConditionalGeneration", _t5("encoder"), "encoder.block"),
    "t5-decoder": Case("decoder", "T5ForConditionalGeneration", _t5("decoder"), "decoder.block"),
    "t5-gated": Case("decoder", "T5ForConditionalGeneration", _t5("decoder", "gated-gelu"), "decoder.block"),
    "vit": Case("encoder", "ViTForImageClassification", _vit, "vit.layers", image=64),
    "swin": Case("stage1", "SwinForImageClassification", _swin, "swin.encoder.layers.0.blocks", image=112),
}


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Make the CPU save what CUDA saves: dropout masks of one byte, and none at all from a fused attention kernel."""
    functional = torch.nn.functional
    fused = functional.scaled_dot_product_attention

    def dropout(values: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(values, p, True)[0] if training and p > 0 else values

    def attend(*tensors: Any, dropout_p: float = 0.0, **options: Any) -> Any:
        return fused(*tensors, **options)

    with (
        mock.patch.object(functional, "dropout", dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", attend),
    ):
        yield


def saved_bytes(case: Case, config: Any, training: Training) -> int:
    """Bytes of all distinct storages autograd keeps after forward."""
    config._attn_implementation = "sdpa" if training.attention is Attention.FUSED else "eager"
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(config).train()
    model.to(torch.float32 if training.precision is Precision.FP32 else torch.bfloat16)
    if training.compile:
        torch._dynamo.reset()
        for block in model.get_submodule(case.blocks):
            block.compile(backend="aot_eager_decomp_partition")
    for name, parameter in model.named_parameters():
        if "relative" in name:  # else the CPU's fused kernel declines the bias; CUDA's takes it
            parameter.requires_grad_(training.attention is not Attention.FUSED)
    if case.image:
        images = torch.zeros(1, 3, case.image, case.image, dtype=model.dtype)
        inputs = {"pixel_values": images, "labels": torch.zeros(1, dtype=torch.long)}
    else:
        ids = torch.randint(0, VOCABULARY, (1, TOKENS))
        inputs = {"input_ids": ids, "labels": ids}
    fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        # Integers are token ids, and position buckets that the whole batch shares.
        if storage.data_ptr() not in fixed and tensor.dtype is not torch.long:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # keeps the storage alive, so that no address is used twice

    with as_on_cuda(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
    assert output.loss.requires_grad
    return sum(kept.values())


def stated(config: Any, folder: Path, training: Training, *, image: bool) -> ModelSpec:
    config.save_pretrained(folder)
    return load_any_model(folder, replace(training, sequence_length=None if image else TOKENS))


_BF16 = ("bert", "llama")
"""What ``make test`` has in bf16, which takes CPUs long; in fp32 it has all."""


@pytest.mark.parametrize("attention", [Attention.EAGER, Attention.FUSED])
@pytest.mark.parametrize(
    ("name", "precision", "dropout"),
    [
        *((name, Precision.FP32, dropout) for name in CASES for dropout in (0.0, 0.1)),
        *(own if own[0] in _BF16 else longer(*own) for own in ((name, Precision.BF16, 0.0) for name in CASES)),
    ],
)
def test_a_block_saves_what_autograd_saves(
    name: str, precision: Precision, dropout: float, attention: Attention, tmp_path: Path
) -> None:
    case = CASES[name]
    training = Training(precision=precision, attention=attention)
    measured_as = training
    if name == "llama-grouped" and precision is Precision.FP32:
        measured_as = Training(attention=Attention.EAGER)  # the CPU has a fused kernel for this, CUDA has none
    few, more = (saved_bytes(case, case.configure(layers, dropout), measured_as) for layers in (2, 4))
    spec = stated(case.configure(2, dropout), tmp_path, training, image=bool(case.image))
    block = next(kind for kind in spec.kinds if kind.name == case.block)
    # bf16: the CPU keeps norm statistics in bf16 where CUDA keeps fp32.
    assert block.activation_bytes == pytest.approx((more - few) / 2, rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "dropout"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5-encoder", "vit", "swin"])
def test_a_model_saves_what_autograd_saves(name: str, dropout: float, tmp_path: Path) -> None:
    """Embedding and head as well: blocks once, everything else besides."""
    case = CASES[name]
    training = Training(attention=Attention.EAGER)
    measured = saved_bytes(case, case.configure(1, dropout), training)
    spec = stated(case.configure(1, dropout), tmp_path, training, image=bool(case.image))
    assert spec.activation_bytes == pytest.approx(measured, rel=0.02)


def _qwen3(layers: int, dropout: float) -> Any:
    return transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        vocab_size=VOCABULARY,
        attention_dropout=dropout,
        use_cache=False,
    )


def _neox(layers: int, dropout: float) -> Any:
    return transformers.GPTNeoXConfig(
        architectures=["GPTNeoXForCausalLM"],
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=192,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        use_cache=False,
    )


_TRACED = {
    "qwen3": Case("block", "Qwen3ForCausalLM", _qwen3, "model.layers"),
    "neox": Case("block", "GPTNeoXForCausalLM", _neox, "gpt_neox.layers"),
}
"""Of no family: what it saves is traced."""
_COMPILED = (
    ("llama", Precision.BF16, 0.0, Attention.FUSED),
    ("bert", Precision.FP32, 0.1, Attention.EAGER),
)
"""What ``make test`` has of compiled blocks, each of which takes seconds."""


@pytest.mark.parametrize(
    ("name", "precision", "dropout", "attention"),
    [
        own if own in _COMPILED else longer(*own)
        for own in (
            (name, precision, dropout, attention)
            for name in (*CASES, *_TRACED)
            for precision, dropout in ((Precision.FP32, 0.1), (Precision.BF16, 0.0))
            for attention in (Attention.EAGER, Attention.FUSED)
        )
    ],
)
def test_a_compiled_block_saves_what_the_compiler_keeps(
    name: str, precision: Precision, dropout: float, attention: Attention, tmp_path: Path
) -> None:
    if name == "llama-grouped" and precision is Precision.FP32 and attention is Attention.FUSED:
        pytest.skip("the CPU has a fused kernel for this, CUDA has none")
    if name in _TRACED and dropout and attention is Attention.FUSED:
        pytest.skip("it is traced as on the CPU, which has no fused kernel for this")
    case = {**CASES, **_TRACED}[name]
    training = Training(precision=precision, attention=attention, compile=True)
    few, more = (saved_bytes(case, case.configure(layers, dropout), training) for layers in (2, 4))
    spec = stated(case.configure(2, dropout), tmp_path, training, image=bool(case.image))
    block = next(kind for kind in spec.kinds if kind.name == case.block)
    assert block.activation_bytes == pytest.approx((more - few) / 2, rel=0.01)
