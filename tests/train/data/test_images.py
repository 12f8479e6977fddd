"""Images from class folders: labels, pixels, crops, and damaged files."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import config
from torch import Tensor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.train.data import Data, Loader, open_data
from galvatron.train.data.order import generator_of

CLASSES = ("ape", "bear", "cat")
VIT = config("vit", num_labels=3)
SIDE = 16


def write(root: Path, each: int = 4, size: tuple[int, int] = (40, 30)) -> Path:
    """Images of one colour: red is the class times 100, green the number, blue 200."""
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(each):
            Image.new("RGB", size, (100 * label, number, 200)).save(root / name / f"{number}.png")
    (root / ".cache").mkdir()
    (root / "labels.csv").touch()
    return root


def opened(root: Path, **options: float) -> Data:
    return open_data(root, VIT, Training(), **options)  # type: ignore[arg-type]


def pixels(data: Data, index: int = 0, seed: int = 0) -> Tensor:
    return data.train.sample(index, generator_of(seed))["pixel_values"]


def test_labels_are_the_sorted_classes_and_pixels_go_from_minus_one_to_one(tmp_path: Path) -> None:
    data = opened(write(tmp_path / "images"))
    assert len(data.train) == 12
    for index in range(12):
        label, number = divmod(index, 4)
        sample = data.train.sample(index, generator_of(index))
        assert sample["labels"].item() == label
        assert sample["pixel_values"].shape == (3, SIDE, SIDE)
        colour = torch.tensor([100 * label, number, 200]) / 255 * 2 - 1
        torch.testing.assert_close(sample["pixel_values"], colour[:, None, None].expand(3, SIDE, SIDE))


def test_normalisation_is_the_models(tmp_path: Path) -> None:
    root = write(tmp_path / "images")
    content = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 2]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    data = open_data(root, VIT, Training(), model_folder=tmp_path)
    found = pixels(data, 5)[:, 0, 0].tolist()
    assert found == pytest.approx([(100 / 255 - 0.1) / 0.5, (1 / 255 - 0.2) / 0.25, (200 / 255 - 0.3) / 2], abs=1e-6)
    for field, value in (("image_std", [0, 1, 1]), ("image_mean", [1, 2]), ("image_mean", "grey")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**content, field: value}))
        with pytest.raises(InvalidInput, match=f"preprocessor_config.json: {field} is"):
            open_data(root, VIT, Training(), model_folder=tmp_path)


def ramp(path: Path) -> None:
    """128 by 64: red grows from left to right, green from top to bottom, both from 0 to 255."""
    down, across = np.meshgrid(np.linspace(0, 255, 64), np.linspace(0, 255, 128), indexing="ij")
    Image.fromarray(np.stack([across, down, 0 * down], axis=-1).astype(np.uint8)).save(path)


def test_training_crops_and_mirrors_at_random_evaluation_does_not(tmp_path: Path) -> None:
    root = write(tmp_path / "images", each=4)
    for name in CLASSES:
        for number in range(4):
            ramp(root / name / f"{number}.png")
    data = opened(root, held_out=0.25)
    assert data.held_out is not None
    kept = data.held_out.sample(0, generator_of(1))["pixel_values"] / 2 + 0.5
    assert torch.equal(kept, data.held_out.sample(0, generator_of(2))["pixel_values"] / 2 + 0.5)
    loaded = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    theirs = loaded(Image.open(root / CLASSES[0] / "0.png"), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(kept, theirs / 2 + 0.5, msg="as Hugging Face's own processor makes it")

    assert torch.equal(pixels(data, 1, seed=5), pixels(data, 1, seed=5))
    crops = torch.stack([pixels(data, 1, seed) for seed in range(200)]) / 2 + 0.5
    mirrored = crops[:, 0, 0, 0] > crops[:, 0, 0, -1]
    assert 70 < int(mirrored.sum()) < 130
    assert bool((crops[:, 1, 0, 0] < crops[:, 1, -1, 0]).all()), "never upside down"
    across = (crops[:, 0].amax((1, 2)) - crops[:, 0].amin((1, 2))) / (1 - 1 / SIDE)
    down = (crops[:, 1].amax((1, 2)) - crops[:, 1].amin((1, 2))) / (1 - 1 / SIDE)
    area, ratio = across * down, 2 * across / down
    assert 0.06 < area.min() < 0.2
    assert 0.6 < area.max() < 1.05
    assert 0.7 < ratio.min() < 0.8
    assert 1.2 < ratio.max() < 1.42


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named(tmp_path: Path, workers: int) -> None:
    root = write(tmp_path / "images")
    path = root / "bear" / "2.png"
    path.write_bytes(path.read_bytes()[:60])
    loader = Loader(opened(root).train, batch=6, workers=workers)
    with pytest.raises(InvalidInput, match=r"bear/2.png: cannot be read as an image .* mend or remove"):
        list(islice(loader, 2))
    loader.close()


def test_images_of_rows_that_are_not_read_are_not_opened(tmp_path: Path) -> None:
    root = write(tmp_path / "images")
    (root / "ape" / "0.png").write_bytes(b"")
    loader = Loader(opened(root).train, batch=4, seed=None, reads={"pixel_values": frozenset({2})})
    batch = next(loader)
    assert batch["pixel_values"].flatten(1).any(1).tolist() == [False, False, True, False]
    assert batch["labels"].tolist() == [0, 0, 0, 0]


def test_other_modes_become_the_models_channels(tmp_path: Path) -> None:
    root = write(tmp_path / "images", each=1)
    Image.new("LA", (20, 50), (51, 7)).save(root / "ape" / "0.png")
    assert pixels(opened(root))[:, 3, 3].tolist() == pytest.approx([-0.6] * 3)
    grey = open_data(root, config("vit", num_labels=3, num_channels=1), Training())
    assert pixels(grey).shape == (1, SIDE, SIDE)


def test_fingerprint_is_of_the_files_below_the_folder(tmp_path: Path) -> None:
    one, same = (opened(write(tmp_path / name)).train.fingerprint for name in ("one", "same"))
    (tmp_path / "same" / "ape" / "9.png").write_bytes((tmp_path / "same" / "ape" / "1.png").read_bytes())
    assert one == same != opened(tmp_path / "same").train.fingerprint


def test_folders_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "images")
    with pytest.raises(InvalidInput, match=r"has 3 class folders \(ape, bear, cat\); the model has 10 classes"):
        open_data(root, config("vit"), Training())
    with pytest.raises(InvalidInput, match=r"1.png': is a file"):
        opened(root / "ape" / "1.png")
    with pytest.raises(InvalidInput, match="no such file or folder"):
        opened(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="num_channels is 4"):
        open_data(root, config("vit", num_labels=3, num_channels=4), Training())
    for path in (root / "cat").iterdir():
        path.unlink()
    with pytest.raises(InvalidInput, match="cat': the class folder has no images"):
        opened(root)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInput, match=r"needs PIL, which is not installed; pip install \"galvatron\[data\]\""):
        opened(root)


def test_a_processor_with_other_rules_is_followed(tmp_path: Path) -> None:
    """Resampling, scaling and cropping of the model's own processor: here of one that crops the centre."""
    root = write(tmp_path / "images")
    for name in CLASSES:
        ramp(root / name / "0.png")
    own: Any = BitImageProcessorPil(
        size={"shortest_edge": 20}, crop_size={"height": SIDE, "width": SIDE}, do_normalize=False
    )
    own.save_pretrained(tmp_path)
    data = open_data(root, VIT, Training(), model_folder=tmp_path, held_out=0.25)
    assert data.held_out is not None
    theirs = [
        own(Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"][0] for path in root.rglob("*.png")
    ]
    found = data.held_out.sample(0, generator_of(1))["pixel_values"]
    assert any(torch.equal(found, each) for each in theirs)
    crop = pixels(data, 0)
    assert 0 <= float(crop.min()) <= float(crop.max()) <= 1, "not normalised, as the processor says"
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    with pytest.raises(InvalidInput, match="no image processor can be made of it"):
        open_data(root, VIT, Training(), model_folder=tmp_path)
