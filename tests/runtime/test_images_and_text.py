"""Models of images and text train on images under any plan, and equal the stock model in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longer import longer
from ranks import ranks
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
)

import galvatron
from galvatron.core.spec import Training
from galvatron.families.build import without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.layer import IGNORED
from galvatron.runtime.unpriced import facts_of, unpriced

_RATE, _EPSILON, _STEPS, _ROWS = 1e-3, 1e-6, 3, 8
_IMAGE = 60
"""The token that stands for an image."""
_TEXT: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
_SEEN: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip


def _llava() -> Any:
    """Reads what the last block but one of CLIP made."""
    vision = CLIPVisionConfig(**_SEEN, image_size=8, projection_dim=16)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_TEXT), image_token_id=_IMAGE)
    return LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa")


def _gemma3() -> Any:
    """Tokens of an image see each other, which its token_type_ids say."""
    vision = SiglipVisionConfig(**_SEEN, image_size=16)
    text = Gemma3TextConfig(**_TEXT, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(vision_config=vision, text_config=text, image_token_id=_IMAGE, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa")


def _qwen() -> Any:
    """Lists of patches, windows, and positions in three dimensions."""
    vision = {
        "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**_TEXT, "rope_parameters": rope}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, image_token_id=_IMAGE, vision_start_token_id=61)
    return Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")


_MODELS = {"llava": _llava, "gemma3": _gemma3, "qwen2.5-vl": _qwen}
_LAYERS = {
    "llava": ["vision-embedding", "vision", "vision", "vision-unused", "connector", "block", "block", "head"],
    "gemma3": [
        "vision-embedding", "vision", "vision", "vision", "connector", "sliding_attention", "full_attention", "head"
    ],
    "qwen2.5-vl": [
        "vision-embedding", "vision-windows", "vision-full_attention", "vision-windows", "connector", "block", "block",
        "head",
    ],
}  # fmt: skip


def _model(name: str, frozen: bool = False) -> Any:
    torch.manual_seed(0)
    model = _MODELS[name]()
    if frozen:
        tower = model.model.visual if name == "qwen2.5-vl" else model.model.vision_tower
        tower.requires_grad_(False)
    return model.double()


def _batches(name: str, images: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """With so many images in each sample, any text around them, padding, and labels that do not count."""
    generator = torch.Generator().manual_seed(1)
    return [_batch(name, images, generator) for _ in range(_STEPS)]


def _batch(name: str, images: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 58, (_ROWS, 20), generator=generator)
    sizes: list[tuple[int, int]] = []
    for row, count in enumerate(images):
        place = 1
        for number in range(count):
            size = ((4, 2, 4)[row % 3], (2, 4)[(row + number) % 2]) if name == "qwen2.5-vl" else (4, 4)
            sizes.append(size)
            tokens = size[0] * size[1] // 4
            ids[row, place : place + tokens] = _IMAGE
            place += tokens + 2
    seen = ids == _IMAGE
    labels = ids.masked_fill(seen, IGNORED)
    labels[2, 17:] = IGNORED
    mask = torch.ones_like(ids)
    mask[1, 16:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name == "qwen2.5-vl":
        grid = torch.tensor([(1, *size) for size in sizes])
        pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)
        return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": seen.int()}
    side = 16 if name == "gemma3" else 8
    batch["pixel_values"] = torch.randn(len(sizes), 3, side, side, generator=generator)
    return {**batch, "token_type_ids": seen.long()} if name == "gemma3" else batch


def _one_process(name: str, images: tuple[int, ...], frozen: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = _model(name, frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=_EPSILON)
    losses = []
    for batch in _batches(name, images):
        batch["pixel_values"] = batch["pixel_values"].double()
        output = model(**batch)
        labels = batch["labels"][:, 1:]
        logits = output.logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        torch.testing.assert_close(loss, output.loss.double(), rtol=1e-5, atol=0)  # its own, in fp32
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: own.detach() for name, own in model.named_parameters()}


def _under(name: str, images: tuple[int, ...], frozen: bool, plan: galvatron.Plan) -> tuple[list[float], Any]:
    batches = _batches(name, images)
    model = galvatron.parallelize(
        _model(name, frozen), plan, dtype=torch.float64, device="cpu", check=False, example=batches[0]
    )
    optimizer = model.optimizer(torch.optim.AdamW, lr=_RATE, eps=_EPSILON)
    losses = []
    for batch in batches:
        losses.append(float(model.forward_backward(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.whole_parameters())


_ONE = (1,) * _ROWS
_MIXED = (2, 0, 1, 1, 0, 3, 0, 1)
"""The third micro-batch of four has images only in its second sample, and so on: some ranks see none."""
_TOGETHER = ["sdp4", "dp4", "sdp4+rc", "dp4+zero2", "dp2-sdp2", "dp4+rc", "sdp4", "dp4"]
_WITH_TP = ["dp4", "sdp4+rc", "dp2-sdp2", "dp4", "dp2-tp2", "tp2-dp2", "tp2-dp2+rc", "sdp2-tp2"]
_TWO_STAGES = [["dp2", "sdp2", "dp2+rc"], ["sdp2", "dp2", "tp2", "dp2+zero2", "tp2"]]
_FOUR_STAGES = [["single"] * 2, ["single"] * 2, ["single"] * 2, ["single"] * 2]


@pytest.mark.parametrize(
    ("name", "images", "frozen", "stages", "micro_batches"),
    [
        longer("llava", _ONE, False, [_TOGETHER], 2),
        longer("llava", _ONE, False, [_WITH_TP], 1),
        longer("llava", _MIXED, True, _TWO_STAGES, 4),
        longer("gemma3", _MIXED, False, [["dp4", *_TOGETHER[1:]]], 2),
        longer("gemma3", _ONE, True, _FOUR_STAGES, 4),
        ("qwen2.5-vl", _MIXED, False, _TWO_STAGES, 4),
    ],
)
def test_equals_one_process(
    name: str, images: tuple[int, ...], frozen: bool, stages: list[list[str]], micro_batches: int
) -> None:
    layered = Generic(without_weights(_model(name)), _batches(name, images)[0])
    assert [layer.kind for layer in layered.layers] == _LAYERS[name]
    plan = unpriced(facts_of(layered, Training(), name), stages)
    plan = replace(plan, batch=_ROWS, micro_batches=micro_batches)
    expected_losses, expected = _one_process(name, images, frozen)
    for losses, parameters in ranks(4).run(_under, name, images, frozen, plan):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        assert parameters.keys() == expected.keys()
        for own, tensor in expected.items():
            torch.testing.assert_close(parameters[own], tensor, rtol=1e-6, atol=1e-7, msg=own)


@pytest.mark.slow
def test_what_it_is_to_the_planner() -> None:
    spec = galvatron.describe(_model("llava").float(), _batches("llava", _ONE)[0])
    kinds = {kind.name: kind for kind in spec.kinds}
    assert [layer.name for layer in spec.layers] == _LAYERS["llava"]
    assert (spec.training.sequence_length, spec.training.image_tokens) == (20, 4)
    tokens, width, inside = 5, 16, 24  # four patches and a class token
    products = 2 * tokens * (4 * width * width + 2 * width * inside) + 2 * 2 * tokens * tokens * width
    assert kinds["vision"].forward_flops == products
    assert kinds["vision-unused"].forward_flops == 0
    assert kinds["vision"].boundary_bytes == tokens * width * 4
    assert kinds["connector"].boundary_bytes == 20 * 32 * 4
    assert kinds["vision"].tensor_parallel is None
    assert kinds["block"].tensor_parallel is not None
    count = sum(layer.parameters - layer.tied_parameters for layer in spec.layers)
    assert count == sum(own.numel() for own in _model("llava").parameters())
