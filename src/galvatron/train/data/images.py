"""Images from a folder of class folders (``root/class/image.jpg``)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.train.data.dataset import Sample
from galvatron.train.data.requirements import ImageRequirements
from galvatron.train.data.tables import extra

__all__ = ["ImageFolder", "Normalisation", "image_folder", "saved_normalisation"]

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB"}
"""Pillow's, by number of channels."""
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
"""Share of the image's area and ratio of sides of a random crop (Szegedy et al. 2014, as all do since)."""
_TRIES = 10
_CENTRE = 0.875
"""Side of the centre crop beside the image's shorter side: 224 of 256."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What is taken from a pixel between 0 and 1, and by what the rest is divided, for each channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class ImageFolder:
    """Images in random crops, half of them mirrored (training), or the middle of each (evaluation)."""

    root: Path
    files: tuple[tuple[str, int], ...] = field(repr=False)
    """Path below the root, and class."""
    needs: ImageRequirements
    normalisation: Normalisation
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
        box = _random_box(image.size, shape, generator) if self.augment else _centre_box(image.size, shape)
        image = image.resize((needs.width, needs.height), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image, np.float32)).view(*shape, needs.channels).permute(2, 0, 1) / 255
        if self.augment and torch.rand((), generator=generator) < 0.5:
            pixels = pixels.flip(2)
        mean, deviation = torch.tensor(self.normalisation.mean), torch.tensor(self.normalisation.deviation)
        return ((pixels - mean[:, None, None]) / deviation[:, None, None]).contiguous()


def image_folder(root: Path, needs: ImageRequirements, normalisation: Normalisation, *, augment: bool) -> ImageFolder:
    """The images of a folder; classes are numbered in the order of their names."""
    extra("PIL", f"data {str(root)!r}: reading images")
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
    return ImageFolder(root, tuple(files), needs, normalisation, augment, digest.hexdigest()[:16])


def saved_normalisation(model_folder: Path | None, channels: int) -> Normalisation:
    """As the model's folder says in its preprocessor_config.json; else pixels go from -1 to 1."""
    half = (0.5,) * channels
    path = None if model_folder is None else model_folder / "preprocessor_config.json"
    if path is None or not path.is_file():
        return Normalisation(half, half)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read as JSON ({error}); copy it from the model again") from None
    mean, deviation = (_channels(content.get(name, half), f"{path}: {name}", channels) for name in _FIELDS)
    if not all(deviation):
        raise InvalidInput(f"{path}: image_std is {list(deviation)}; expected numbers above 0")
    return Normalisation(mean, deviation)


_FIELDS = ("image_mean", "image_std")


def _channels(value: Any, where: str, channels: int) -> tuple[float, ...]:
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * channels
    if len(values) != channels or not all(type(each) in (int, float) for each in values):
        raise InvalidInput(f"{where} is {value!r}; expected {channels} numbers, one for each channel")
    return tuple(float(each) for each in values)


Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""


def _centre_box(size: tuple[int, int], shape: tuple[int, int]) -> Box:
    """The largest part in the middle with the ratio of ``shape`` (height, width), less a margin."""
    width, height = size
    scale = _CENTRE * min(width / shape[1], height / shape[0])
    half_width, half_height = scale * shape[1] / 2, scale * shape[0] / 2
    return width / 2 - half_width, height / 2 - half_height, width / 2 + half_width, height / 2 + half_height


def _random_box(size: tuple[int, int], shape: tuple[int, int], generator: torch.Generator) -> Box:
    """A random part; the middle of images so long that none fits."""
    width, height = size
    for _ in range(_TRIES):
        area, ratio, across, down = torch.rand(4, generator=generator).tolist()
        target = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        sides = math.exp(math.log(_RATIO[0]) + ratio * (math.log(_RATIO[1]) - math.log(_RATIO[0])))
        wide, high = math.sqrt(target * sides), math.sqrt(target / sides)
        if wide <= width and high <= height:
            left, upper = across * (width - wide), down * (height - high)
            return left, upper, min(left + wide, width), min(upper + high, height)
    return _centre_box(size, shape)
