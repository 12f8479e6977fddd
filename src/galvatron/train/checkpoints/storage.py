"""What DCP plans, writes and reads through: our own files and JSON in place of its pickles.

DCP decides who sends what to whom: it gathers every rank's blocks, checks that they cover each tensor once, finds the
saved blocks that a rank's own overlap with, and carries any rank's failure to all of them. This module gives it blocks
of plain tensors (:class:`galvatron.train.checkpoints.layout.Part`), writes each rank's to one file, with their SHA-256
computed on the way, and on reading checks every block it uses.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from galvatron.core.errors import SaveFailed
from galvatron.train.checkpoints.folder import begin, commit, synced, tidy
from galvatron.train.checkpoints.layout import Part
from galvatron.train.checkpoints.manifest import Chunk, Manifest, SavedTensor, read_chunk

__all__ = ["PartsToRead", "PartsToWrite", "Reader", "Writer", "as_bytes", "as_tensor"]


def as_bytes(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def as_tensor(content: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """The tensor in some bytes, sharing their memory."""
    kind = getattr(torch, dtype)
    return torch.frombuffer(content, dtype=kind).view(tuple(shape))


class PartsToWrite(DefaultSavePlanner):
    """DCP's planning for :class:`Part`; ``state_dict`` is a dict of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(key, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=block.shape),
                        properties=TensorProperties(dtype=part.dtype),
                        size=torch.Size(part.shape),
                    ),
                )
                for key, part in self.state_dict.items()
                for offsets, block in part.blocks.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        block: Tensor = self.state_dict[index.fqn].blocks[tuple(index.offset)]
        return block


class PartsToRead(DefaultLoadPlanner):
    """The same for loading, into the blocks themselves."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Part], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, part in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = [
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=block.shape)
                for offsets, block in part.blocks.items()
            ]
            items += create_read_items_for_chunk_list(key, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        block: Tensor = self.state_dict[index.fqn].blocks[tuple(index.offset)]
        return block


class Writer(StorageWriter):
    """Writes one checkpoint aside and, when all ranks are done, makes it complete."""

    def __init__(self, folder: Path, manifest: Manifest, names: Iterable[str], rank: int, keep: int) -> None:
        """``manifest``: without files and tensors, and with this rank's parameters in ``optimizer.group_of``;
        ``names``: of the model's parameters, in its order, which the manifest keeps."""
        self._folder, self._manifest, self._keep = folder, manifest, keep
        self.partial = folder / f"step-{manifest.step:08}.partial"
        self._places = {name: place for place, name in enumerate(names)}
        self._name = f"rank-{rank:05}.bin"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # a writer writes one checkpoint

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # is never chosen by a path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=self._manifest.optimizer.group_of)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        merged = {name: number for plan in plans for name, number in plan.storage_data.items()}
        self._manifest = replace(self._manifest, optimizer=replace(self._manifest.optimizer, group_of=merged))
        begin(self._folder, self._manifest.step)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            path = self.partial / self._name
            with synced(path) as file:
                at = 0
                for item in plan.items:
                    block = planner.resolve_data(item)
                    assert isinstance(block, Tensor)
                    assert item.index.offset is not None
                    content = as_bytes(block)
                    file.write(content)
                    chunk = Chunk(
                        offsets=tuple(item.index.offset),
                        sizes=tuple(block.shape),
                        file=self._name,
                        at=at,
                        bytes=content.nbytes,
                        sha256=hashlib.sha256(content).hexdigest(),
                    )
                    at += content.nbytes
                    results.append(WriteResult(item.index, content.nbytes, chunk))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, int] = {}
        for result in (result for own in results for result in own):
            chunk: Chunk = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            files[chunk.file] = files.get(chunk.file, 0) + chunk.bytes
        for name, size in files.items():
            path = self.partial / name
            if not path.is_file() or path.stat().st_size != size:
                raise SaveFailed(
                    f"{path}: was written by its rank, but rank 0 does not see it in full; save to a folder that all "
                    "machines share"
                )
        tensors = {}
        for key in sorted(chunks, key=lambda key: (self._places[key.split("/")[1]], key)):
            own = metadata.state_dict_metadata[key]
            assert isinstance(own, TensorStorageMetadata)
            dtype = str(own.properties.dtype).removeprefix("torch.")
            tensors[key] = SavedTensor(dtype=dtype, shape=tuple(own.size), chunks=tuple(chunks[key]))
        manifest = replace(self._manifest, files=files, tensors=tensors)
        tidy(self._folder, commit(self.partial, manifest.text()), self._keep)


class Reader(StorageReader):
    """Reads blocks of one checkpoint, each checked as a whole, in the order they have on disk."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._chunks = {
            MetadataIndex(key, chunk.offsets): chunk for key, own in manifest.tensors.items() for chunk in own.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # a reader reads one checkpoint

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # is never chosen by a path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, own.dtype)),
                    size=torch.Size(own.shape),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                        for chunk in own.chunks
                    ],
                )
                for key, own in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index in sorted(wanted, key=lambda index: (self._chunks[index].file, self._chunks[index].at)):
            chunk = self._chunks[index]
            saved = as_tensor(read_chunk(self._folder, chunk), self._manifest.tensors[index.fqn].dtype, chunk.sizes)
            for item in wanted[index]:
                block = saved
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    block = block.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(block)
        done: Future[None] = Future()
        done.set_result(None)
        return done
