"""Images from a folder of class folders (``root/class/image.jpg``)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import parse, read_text, shown
from galvatron.train.data.dataset import Sample
from galvatron.train.data.requirements import ImageRequirements
from galvatron.train.data.rows import extra

__all__ = ["ImageFolder", "image_folder", "image_processor"]

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB"}
"""Pillow's, by number of channels."""
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
"""Share of the image's area and ratio of sides of a random crop (Szegedy et al. 2014, as all do since)."""
_TRIES = 10
_BILINEAR = 2
"""Pillow's number of it."""
_AS_CROPPED = {"do_center_crop": False, "do_pad": False}
"""A random part is of the model's size already."""


@dataclass(frozen=True)
class ImageFolder:
    """Images in random crops, half of them mirrored (training), or as the model's processor takes them (evaluation)."""

    root: Path
    files: tuple[tuple[str, int], ...] = field(repr=False)
    """Path below the root, and class."""
    needs: ImageRequirements
    processor: Any = field(repr=False)
    """Hugging Face's, of the model: it makes pixels of images as it will when the model is used."""
    augment: bool
    fingerprint: str

    def __len__(self) -> int:
        return len(self.files)

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        name, label = self.files[index]
        if "pixel_values" in unread:
            pixels = torch.zeros(self.needs.channels, self.needs.height, self.needs.width)
        else:
            pixels = self._pixels(self.root / name, generator)
        return {"pixel_values": pixels, "labels": torch.tensor(label)}

    def _pixels(self, path: Path, generator: torch.Generator) -> Tensor:
        from PIL import Image

        needs = self.needs
        try:
            with Image.open(path) as file:
                image = file.convert(_MODES[needs.channels])
        except Exception as error:  # whatever a damaged file makes Pillow raise
            raise InvalidInput(
                f"{path}: cannot be read as an image ({type(error).__name__}: {error}); mend or remove the file"
            ) from None
        shape = needs.height, needs.width
        if not self.augment:
            return self._processed(image, path)
        box = _random_box(image.size, shape, generator)
        image = image.resize((needs.width, needs.height), Image.Resampling(self._resample), box=box)
        if torch.rand((), generator=generator) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self._processed(image, path, do_resize=False, **_AS_CROPPED)

    @property
    def _resample(self) -> int:
        found = getattr(self.processor, "resample", None)
        return _BILINEAR if found is None else int(found)

    def _processed(self, image: Any, path: Path, **how: bool) -> Tensor:
        needs = self.needs
        known = {name: value for name, value in how.items() if hasattr(self.processor, name)}
        made = self.processor(image, return_tensors="pt", input_data_format="channels_last", **known)
        pixels: Tensor = made["pixel_values"][0]
        if tuple(pixels.shape) != (needs.channels, needs.height, needs.width):
            raise InvalidInput(
                f"{path}: the model's image processor makes {list(pixels.shape)} of it; the model takes "
                f"{[needs.channels, needs.height, needs.width]}: mend size in its preprocessor_config.json"
            )
        return pixels.contiguous()


def image_folder(root: Path, needs: ImageRequirements, processor: Any, *, augment: bool) -> ImageFolder:
    """The images of a folder; classes are numbered in the order of their names."""
    if needs.channels not in _MODES:
        raise InvalidInput(f"the model's num_channels is {needs.channels}; images in files have 1 or 3 channels")
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) != needs.classes:
        shown = ", ".join([*classes[:5], *(["…"] if len(classes) > 5 else [])])
        raise InvalidInput(
            f"data {str(root)!r}: has {len(classes)} class folders ({shown or 'none'}); the model has {needs.classes} "
            "classes: give a folder with one folder of images for each class, or change num_labels of the model's "
            "configuration"
        )
    files: list[tuple[str, int]] = []
    digest = hashlib.sha256()
    for label, name in enumerate(classes):
        found = sorted(path for path in (root / name).rglob("*") if path.suffix.lower() in _SUFFIXES)
        if not found:
            raise InvalidInput(
                f"data {str(root / name)!r}: the class folder has no images ({', '.join(_SUFFIXES)}); remove the "
                "folder or add some"
            )
        for path in found:
            files.append((str(path.relative_to(root)), label))
            digest.update(f"{files[-1]} {path.stat().st_size}\n".encode())
    return ImageFolder(root, tuple(files), needs, processor, augment, digest.hexdigest()[:16])


def image_processor(model_folder: Path | None, needs: ImageRequirements) -> Any:
    """That of the model's folder; else one that makes pixels from -1 to 1, of the model's size. With Pillow, so that a
    sample is the same wherever it is made, with torchvision or without."""
    extra("PIL", "reading images")
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    path = None if model_folder is None else model_folder / "preprocessor_config.json"
    size = {"height": needs.height, "width": needs.width}
    half = (0.5,) * needs.channels
    kind: Any = ViTImageProcessorPil
    if path is None or not path.is_file():
        return kind(size=size, image_mean=half, image_std=half)
    content = parse(read_text(path, "how images are prepared"), str(path), "JSON")
    if not isinstance(content, dict):
        raise InvalidInput(f"{path}: is {shown(content)}; expected an object; copy it from the model again")
    for name, least in (("image_mean", None), ("image_std", 0.0)):
        _check_channels(content.get(name, half), f"{path}: {name}", needs.channels, above=least)
    if not {"image_processor_type", "feature_extractor_type"} & content.keys():
        return kind(**{"size": size, **content})
    from transformers import AutoImageProcessor

    auto: Any = AutoImageProcessor
    try:
        return auto.from_pretrained(str(model_folder), local_files_only=True, backend="pil")
    except Exception as error:  # whatever a damaged file makes transformers raise
        said = str(error).strip().partition("\n")[0]
        raise InvalidInput(
            f"{path}: no image processor can be made of it ({type(error).__name__}: {said}); copy it from the model "
            "again"
        ) from None


def _check_channels(value: Any, where: str, channels: int, *, above: float | None) -> None:
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * channels
    if len(values) != channels or not all(type(each) in (int, float) for each in values):
        raise InvalidInput(f"{where} is {value!r}; expected {channels} numbers, one for each channel")
    if above is not None and not all(each > above for each in values):
        raise InvalidInput(f"{where} is {value!r}; expected numbers above {above:g}")


Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""


def _random_box(size: tuple[int, int], shape: tuple[int, int], generator: torch.Generator) -> Box:
    """A random part; of images so long that none fits, the largest in the middle with the ratio of ``shape``."""
    width, height = size
    for _ in range(_TRIES):
        area, ratio, across, down = torch.rand(4, generator=generator).tolist()
        target = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        sides = math.exp(math.log(_RATIO[0]) + ratio * (math.log(_RATIO[1]) - math.log(_RATIO[0])))
        wide, high = math.sqrt(target * sides), math.sqrt(target / sides)
        if wide <= width and high <= height:
            left, upper = across * (width - wide), down * (height - high)
            return left, upper, min(left + wide, width), min(upper + high, height)
    scale = min(width / shape[1], height / shape[0])
    half_width, half_height = scale * shape[1] / 2, scale * shape[0] / 2
    return width / 2 - half_width, height / 2 - half_height, width / 2 + half_width, height / 2 + half_height
