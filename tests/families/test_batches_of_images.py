"""Batches with images: divided by samples as the image tokens say, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.images import IMAGES, ImageRows

_IMAGE = 9


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_token_id=_IMAGE, vision_config=SimpleNamespace(spatial_merge_size=2))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        raise NotImplementedError


def _ids(*tokens: int) -> Tensor:
    """Samples with so many image tokens."""
    ids = torch.zeros(len(tokens), 12, dtype=torch.long)
    for row, count in enumerate(tokens):
        ids[row, :count] = _IMAGE
    return ids


def _batch(tokens: tuple[int, ...], images: int, **more: Tensor) -> dict[str, Tensor]:
    pixels = torch.arange(images, dtype=torch.float32)[:, None, None, None].expand(-1, 3, 2, 2)
    return {"input_ids": _ids(*tokens), "pixel_values": pixels, **more}


@pytest.mark.parametrize(
    ("tokens", "images", "counts"),
    [((2, 2, 2), 3, [1, 1, 1]), ((4, 0, 2), 3, [2, 0, 1]), ((3, 5, 4), 3, [1, 1, 1]), ((8, 4, 0), 3, [2, 1, 0])],
)
def test_images_go_with_their_tokens(tokens: tuple[int, ...], images: int, counts: list[int]) -> None:
    rows, batch = ImageRows(_Model()), _batch(tokens, images)
    divided = rows.by_rows(batch)
    assert divided[IMAGES].tolist() == counts
    assert divided["pixel_values"].shape == (3, max(counts), 3, 2, 2)
    # Whichever samples are chosen, in whichever order, they keep their own images.
    owner = [row for row, count in enumerate(counts) for _ in range(count)]
    for chosen in ([0], [2, 0], [1, 2], [2, 1, 0]):
        seen = rows.as_lists({name: own[chosen] for name, own in divided.items()})
        expected = [image for row in chosen for image, own in enumerate(owner) if own == row]
        found = seen["pixel_values"][:, 0, 0, 0].tolist() if "pixel_values" in seen else []
        assert found == expected


def test_patches_go_with_their_tokens() -> None:
    """Grids of 2 × 2, 2 × 4 and 4 × 4 patches, of which four make a token."""
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4]])
    batch = {"input_ids": _ids(3, 0, 4), "pixel_values": torch.arange(28.0)[:, None], "image_grid_thw": grid}
    rows = ImageRows(_Model())
    divided = rows.by_rows(batch)
    assert divided["pixel_values"].shape == (3, 16, 1)
    assert rows.entries(divided) == [12, 0, 16]
    seen = rows.as_lists({name: own[[2, 0]] for name, own in divided.items()})
    assert seen["pixel_values"].flatten().tolist() == [*range(12, 28), *range(12)]
    assert seen["image_grid_thw"].tolist() == grid[[2, 0, 1]].tolist()
    text = rows.as_lists({name: own[[1]] for name, own in divided.items()})
    assert "pixel_values" not in text
    assert text["image_grid_thw"].shape == (0, 3)  # positions follow from it


_SIZES = torch.tensor([[2, 2]] * 3)
_GRID = torch.tensor([[1, 2, 2], [1, 2, 4]])


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (_batch((3, 3, 1), 4), "4 images for samples with 3, 3, 1 image tokens"),
        (_batch((4, 0, 2), 3, image_sizes=_SIZES), "cannot be told which image is whose"),  # which may differ in tokens
        (_batch((2, 2, 2), 3, pixel_values_videos=torch.zeros(1)), "videos and sounds beside images are not divided"),
        (
            {"input_ids": _ids(2, 1), "pixel_values": torch.zeros(12, 1), "image_grid_thw": _GRID},
            "sample 0 has 2 image",
        ),
        ({"input_ids": _ids(1, 0), "pixel_values": torch.zeros(12, 1), "image_grid_thw": _GRID}, "are those of 1"),
        ({"input_ids": _ids(1, 2), "pixel_values": torch.zeros(9, 1), "image_grid_thw": _GRID}, "9 patches"),
    ],
)
def test_what_is_not_certain_is_refused(batch: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        ImageRows(_Model()).by_rows(batch)
