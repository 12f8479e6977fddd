"""Weights in Hugging Face's format, from a checkpoint or a model that trains: what ``from_pretrained`` loads.

One parameter is in memory at a time, whatever the model's size, so one process without a GPU exports any checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.core.errors import CheckpointCorrupt, InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.core.spec.tuning import Lora
from galvatron.families.build import build_meta
from galvatron.families.saved import saved_names
from galvatron.runtime.model import ParallelModel
from galvatron.train.checkpoints.adapters import is_exported, lora_of_plan, merged, merged_shapes, write_adapters
from galvatron.train.checkpoints.companions import write_companions
from galvatron.train.checkpoints.folder import Saved
from galvatron.train.checkpoints.manifest import Manifest, SavedTensor, read_chunk
from galvatron.train.checkpoints.storage import as_bytes, as_tensor
from galvatron.train.checkpoints.together import together

__all__ = ["export", "export_model"]

_SHARD_BYTES = 5 * 10**9
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of types in safetensors."""


def export(
    checkpoint: Saved,
    out: str | Path,
    *,
    adapters: bool = False,
    companions: Path | None = None,
    base: Path | None = None,
) -> str | None:
    """Write a checkpoint's weights and configuration to a new folder, checking every byte that is read.

    Low-rank adapters are merged into the weights; ``adapters``: they alone are written, as peft does, for the model in
    the folder ``base``. ``companions``: a folder with the tokenizer and generation settings that go with them. Returns
    what is missing, for people.
    """
    manifest = Manifest.read(checkpoint.path)
    parameters = manifest.parameters
    if adapters:
        lora = lora_of_plan(manifest.plan)
        chosen = {name: own for name, own in parameters.items() if is_exported(name, lora)}
        whole = ((name, _whole(checkpoint.path, own)) for name, own in chosen.items())
        write_adapters(manifest.plan, whole, Path(out), base)
        return None if companions is None else write_companions(companions, Path(out), None)
    tensors = parameters | manifest.buffers
    outlines = {name: (own.shape, getattr(torch, own.dtype)) for name, own in tensors.items()}
    facts = _facts(manifest.plan, _widened(outlines, parameters))
    whole = ((name, _whole(checkpoint.path, own)) for name, own in tensors.items())
    _write(facts, facts.stock_tensors(whole), Path(out))
    return None if companions is None else write_companions(companions, Path(out), facts.stock)


def export_model(model: ParallelModel, out: str | Path, *, adapters: bool = False) -> None:
    """Write the weights of a model as it is now; call it on every rank. Rank 0 writes. Low-rank adapters are merged,
    unless they alone are to be written."""
    whole = model.whole_parameters()

    def write() -> None:
        if model.rank == 0 and adapters:
            write_adapters(model.plan.to_dict(), whole, Path(out))
        elif model.rank == 0:
            buffers = model.buffers.values()
            dtype = max((own.dtype for own in model.parameters()), key=lambda own: own.itemsize)
            outlines = {name: (shape, dtype) for name, shape in model.shapes.items()}
            outlines |= {name: (tuple(own.shape), own.dtype) for name, own in buffers.items()}
            facts = _facts(model.plan.to_dict(), outlines)
            _write(facts, facts.stock_tensors(chain(whole, buffers.items())), Path(out))

    def write_and_go_on() -> None:
        try:
            write()
        finally:
            for _ in whole:  # what rank 0 does not take after an error, or the others at all, must be gathered still
                pass

    together(dist.group.WORLD, write_and_go_on)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """All that is known before the first weight is read."""

    config: Mapping[str, Any]
    """The content of config.json."""
    names: Mapping[str, str]
    """In the files, by the stock model's; in the order they are written."""
    tensors: Mapping[str, _Outline]
    """By the stock model's names."""
    stock: Any
    lora: Lora | None

    def stock_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """As the stock model has them, from those of the model that trained."""
        return tensors if self.lora is None else merged(tensors, self.lora, self.stock)

    def bytes(self, name: str) -> int:
        shape, dtype = self.tensors[name]
        return torch.Size(shape).numel() * dtype.itemsize


_Outline = tuple[tuple[int, ...], torch.dtype]


def _facts(plan: Mapping[str, Any], tensors: Mapping[str, _Outline]) -> _Facts:
    model = plan["model"]
    if model["config"] is None:
        raise InvalidInput(
            f"model {model['name']!r} has no configuration in its plan (it was described by figures, or given in "
            "memory), so there is no config.json to write"
        )
    strange = [(name, dtype) for name, (_, dtype) in tensors.items() if dtype not in _TYPES]
    if strange:
        raise InvalidInput(
            f"{strange[0][0]}: {strange[0][1]} is no type of a safetensors file, so it cannot be exported"
        )
    stock: Any = build_meta(model["config"], Training(attention=Attention.EAGER), as_named=model["family"] == "generic")
    dtype_name = str(next(dtype for _, dtype in tensors.values())).removeprefix("torch.")  # of the first parameter
    config = {**model["config"], "architectures": [type(stock).__name__], "dtype": dtype_name}
    config.pop("torch_dtype", None)  # the older name of the same field
    tensors = merged_shapes(tensors)
    _check_names(stock, tensors, whole=model["family"] != "generic")
    names = saved_names(stock, list(tensors))
    return _Facts(config=config, names=names, tensors=tensors, stock=stock, lora=lora_of_plan(plan))


def _check_names(stock: Any, tensors: Mapping[str, _Outline], *, whole: bool) -> None:
    """What the class of the configuration does not have, ``from_pretrained`` would drop without a word; what it has
    more, it would fill at random. ``whole``: each parameter has a part in training."""
    own = stock.state_dict(keep_vars=True)
    if whole:
        given = {id(own[name]) for name in tensors if name in own}
        missing = [name for name, tensor in stock.named_parameters() if id(tensor) not in given]
        if missing:
            raise CheckpointCorrupt(f"{missing[0]}: a {type(stock).__name__} has it, but the weights given do not")
    known = {name: tuple(tensor.shape) for name, tensor in own.items()}
    for name, (shape, _) in tensors.items():
        if known.get(name) != shape:
            expected = f"has shape {list(known[name])}" if name in known else "does not exist"
            raise InvalidInput(
                f"{name}: has shape {list(shape)} in the model that trained, but {expected} in a "
                f"{type(stock).__name__} of its configuration, so that from_pretrained would lose it; save "
                "model.whole_parameters() in a form of your own"
            )


def _widened(outlines: Mapping[str, _Outline], parameters: Iterable[str]) -> dict[str, _Outline]:
    """What is frozen may be narrower than what trains: all parameters are written in the widest type."""
    names = set(parameters)
    widest = max((dtype for name, (_, dtype) in outlines.items() if name in names), key=lambda own: own.itemsize)
    return {name: (shape, widest if name in names else dtype) for name, (shape, dtype) in outlines.items()}


def _whole(folder: Path, saved: SavedTensor) -> Tensor:
    whole = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    for chunk in saved.chunks:
        block = as_tensor(read_chunk(folder, chunk), saved.dtype, chunk.sizes)
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[place] = block
    return whole


def _write(facts: _Facts, tensors: Iterable[tuple[str, Tensor]], out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out}: exists and is not empty; give the name of a new folder")
    shards = _shards(facts)
    files = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    coming = iter(tensors)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, names in zip(files, shards, strict=True):
            _write_shard(out / file, names, facts, coming)
        if len(shards) > 1:
            (out / "model.safetensors.index.json").write_text(_index(facts, shards, files), encoding="utf-8")
        # Last, so that a folder that is not complete does not look like a model.
        (out / "config.json").write_text(json.dumps(facts.config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{out}: cannot be written ({error.strerror or error})") from error


def _shards(facts: _Facts) -> list[list[str]]:
    """Names by file, none above the limit unless one parameter is."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in facts.tensors:
        if shards[-1] and size + facts.bytes(name) > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += facts.bytes(name)
    return shards


def _write_shard(path: Path, names: list[str], facts: _Facts, coming: Iterable[tuple[str, Tensor]]) -> None:
    """A file of safetensors (its length, a header in JSON, the bytes), written as the tensors come."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + facts.bytes(name)
        header[facts.names[name]] = {
            "dtype": _TYPES[facts.tensors[name][1]],
            "shape": list(facts.tensors[name][0]),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, (given, tensor) in zip(names, coming, strict=False):
            assert name == given
            file.write(as_bytes(tensor.detach().to("cpu", facts.tensors[name][1]).contiguous()))


def _index(facts: _Facts, shards: list[list[str]], files: list[str]) -> str:
    content = {
        "metadata": {"total_size": sum(facts.bytes(name) for name in facts.tensors)},
        "weight_map": {facts.names[name]: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    return json.dumps(content, indent=2) + "\n"
