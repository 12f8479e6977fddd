"""Whether the parts of a manifest agree: names, types, shapes, blocks and files. A manifest is a file from outside.

Whoever changes one can give it matching checksums, so that nothing in it is believed before this. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from galvatron.families.discovery import families
from galvatron.train.checkpoints.record import ManifestRecord, SavedTensor

__all__ = ["problem_of"]

_DATA_FILE = re.compile(r"rank-\d+\.bin")
_KEY = re.compile(r"(?:model|buffer)/[^/]+|optimizer/[^/]+/[^/]+")
_ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8,
    "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1,
}  # fmt: skip
_MOST_BYTES = 2**50
_OTHER_FAMILIES = ("generic", "custom")


def problem_of(manifest: ManifestRecord) -> str | None:
    """The first thing in a manifest that cannot be; None: all of it agrees."""
    return next(_problems(manifest), None)


def _problems(manifest: ManifestRecord) -> Iterator[str]:
    for name, least in (("step", 0), ("world", 1), ("seed", -(2**64)), ("iteration", 0)):
        if not least <= getattr(manifest, name) < 2**64:
            yield f"{name} is {getattr(manifest, name)}"
    yield from _plan_problems(manifest.plan)
    for name in manifest.files:
        if not _DATA_FILE.fullmatch(name):
            yield f"files names {name[:60]!r}, which is no data file of a checkpoint"
    held = dict.fromkeys(manifest.files, 0)
    for key, tensor in manifest.tensors.items():
        if not _KEY.fullmatch(key):
            yield f"tensors names {key[:60]!r}, which is no parameter, buffer or state of an optimizer"
        for problem in _tensor_problems(tensor, manifest.files):
            yield f"{key[:200]}: {problem}"
        for chunk in tensor.chunks:
            held[chunk.file] += chunk.bytes
    for name, size in manifest.files.items():
        if held[name] != size:
            yield f"files: {name} has {size} bytes, but its blocks have {held[name]}"
    if not manifest.parameters:
        yield "tensors has no parameter of a model"
    yield from _optimizer_problems(manifest)


def _plan_problems(plan: Mapping[str, Any]) -> Iterator[str]:
    model = plan.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        yield "plan.model has no name"
        return
    config, family = model.get("config"), model.get("family")
    if config is not None and not (isinstance(config, dict) and isinstance(config.get("model_type"), str)):
        yield "plan.model.config names no architecture (model_type)"
    elif family not in (*families(), *_OTHER_FAMILIES, *([config["model_type"]] if config else [])):
        yield f"plan.model.family is {str(family)[:60]!r}, which is no family of models"
    if not isinstance(model.get("training"), dict):
        yield "plan.model.training is missing"


def _tensor_problems(tensor: SavedTensor, files: Mapping[str, int]) -> Iterator[str]:
    item = _ITEM_BYTES.get(tensor.dtype)
    if item is None:
        yield f"its type {tensor.dtype[:30]!r} is not one of {', '.join(_ITEM_BYTES)}"
        return
    if min(tensor.shape, default=1) < 0 or math.prod(tensor.shape) * item > _MOST_BYTES:
        yield f"its shape is {list(tensor.shape)}"
        return
    for chunk in tensor.chunks:
        if chunk.file not in files:
            yield f"a block is in {chunk.file[:60]!r}, which files does not name"
            return
        bounds = list(zip(chunk.offsets, chunk.sizes, tensor.shape, strict=False))
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape) or any(
            start < 0 or size < 0 or start + size > whole for start, size, whole in bounds
        ):
            shape = list(tensor.shape)
            yield f"a block of {list(chunk.sizes)} at {list(chunk.offsets)} is not inside its shape {shape}"
            return
        if chunk.bytes != math.prod(chunk.sizes) * item:
            yield f"a block of {list(chunk.sizes)} {tensor.dtype} has {chunk.bytes} bytes"
        if not 0 <= chunk.at <= files[chunk.file] - chunk.bytes:
            yield f"a block at byte {chunk.at} with {chunk.bytes} bytes is not inside {chunk.file}"
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape) or _overlap(tensor):
        yield f"its blocks do not cover its shape {list(tensor.shape)} once"


def _overlap(tensor: SavedTensor) -> bool:
    """Whether two blocks have an element in common."""
    if len(tensor.chunks) < 2 or not tensor.shape:
        return len(tensor.chunks) > 1
    begin = np.array([chunk.offsets for chunk in tensor.chunks])
    end = begin + np.array([chunk.sizes for chunk in tensor.chunks])
    common = ((begin[:, None] < end) & (begin < end[:, None])).all(axis=2)
    return int(np.count_nonzero(common)) > len(tensor.chunks)


def _optimizer_problems(manifest: ManifestRecord) -> Iterator[str]:
    parameters, groups = manifest.parameters, len(manifest.optimizer.groups)
    for key in manifest.tensors:
        if key.startswith("optimizer/") and key.split("/")[1] not in parameters:
            yield f"{key[:200]}: is a state of no parameter"
    for name, group in manifest.optimizer.group_of.items():
        if name not in parameters or not 0 <= group < groups:
            yield f"optimizer.group_of: {name[:200]!r} is no parameter, or its group {group} is not one of {groups}"
