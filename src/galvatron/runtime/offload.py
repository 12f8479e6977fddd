"""Saved activations in the host's memory: copied there beside forward, and back one layer ahead of backward.

On CUDA two streams of their own copy, from and to pinned memory; elsewhere a copy is made at once. What is copied are
whole storages, each once, however many views of it a layer saves.

A layer's tensors leave the device when the layer after the next begins, which waits for their copies: so what one layer
saved is on its way while the next one computes, and no more than that. The last two are still there when backward
begins. No stream is recorded with the allocator: it would keep memory as long as the processor is ahead of the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["LEAST_BYTES", "HostMemory"]

_ON_THE_WAY = 1
"""Layers whose tensors are copied while the next one computes."""
LEAST_BYTES = 1 << 16
"""What is smaller stays: starting a copy takes longer than it is worth."""


class HostMemory:
    """What the layers of one rank have on the host, and the streams that copy it."""

    def __init__(self, device: torch.device) -> None:
        self.least_bytes = LEAST_BYTES
        self.moved_bytes = 0
        """Copied to the host so far."""
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None
        """There and back: a copy there must not wait for one back."""
        self._leaving: deque[weakref.ref[_Pass]] = deque()
        """Layers whose tensors are still on the device, the oldest first."""
        self._last: weakref.WeakValueDictionary[tuple[int, int], _Pass] = weakref.WeakValueDictionary()
        """Of each micro-batch, the layer whose forward was last: its backward is first."""

    def around(
        self, parameters: Iterable[Tensor], given: Iterable[Any], step: tuple[int, int]
    ) -> AbstractContextManager[Any]:
        """Around the forward of a layer. Its parameters stay where they are, and so does what all layers are given
        (masks, positions); views of these too."""
        stays = {_number(own) for own in (*parameters, *_tensors(given))}
        own = _Pass(self, stays, self._last.get(step))
        self._last[step] = own
        self._leaving.append(weakref.ref(own))
        while len(self._leaving) > _ON_THE_WAY + 1:
            left = self._leaving.popleft()()
            if left is not None:
                left.release()
        return saved_tensors_hooks(own.pack, own.unpack)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (own for part in value.values() for own in _tensors(part))
    elif isinstance(value, list | tuple):
        yield from (own for part in value for own in _tensors(part))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (own for part in fields(value) for own in _tensors(getattr(value, part.name)))


class _Pass:
    """What one forward of one layer saved; alive as long as that is."""

    def __init__(self, host: HostMemory, stays: set[int], before: _Pass | None) -> None:
        self._host, self._stays = host, stays
        self._before = None if before is None else weakref.ref(before)
        self._moved: dict[tuple[int, int], _Moved] = {}
        self._begun = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        stays = storage.nbytes() < self._host.least_bytes or _number(tensor) in self._stays
        if stays or isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        key = _number(tensor), tensor._version
        if key not in self._moved:
            self._moved[key] = _Moved(storage, self._host)
            self._host.moved_bytes += storage.nbytes()
        return _View(self._moved[key], tensor)

    def unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not self._begun:
            self._begun = True
            self.fetch()
            before = self._before() if self._before is not None else None
            if before is not None:
                before.fetch()  # while this layer computes
            self._moved.clear()  # from here on each is there as long as it is needed
        return kept.restored()

    def release(self) -> None:
        """Let go of what is on the device, when its copies are made."""
        for moved in self._moved.values():
            moved.release()

    def fetch(self) -> None:
        """Start all copies back."""
        for moved in self._moved.values():
            moved.fetch()


class _Moved:
    """A storage on the host."""

    def __init__(self, storage: torch.UntypedStorage, host: HostMemory) -> None:
        # As long as this is held, no other storage has the same number.
        self._was = StorageWeakRef(storage)
        self._streams, self._device = host.streams, storage.device
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._host = torch.empty(len(flat), dtype=torch.uint8, pin_memory=self._streams is not None)
        self._here: Tensor | None = flat
        self._copied: torch.cuda.Event | None = None
        """Of the copy that was last, there or back, until the device's own stream has waited for it."""
        if self._streams is None:
            self._host.copy_(flat)
            return
        there, _ = self._streams
        there.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(there):
            self._host.copy_(flat, non_blocking=True)
            self._copied = there.record_event()

    def __del__(self) -> None:
        self._wait()  # else others would get memory that a copy still writes to or reads

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def release(self) -> None:
        """Let go of the storage on the device."""
        self._wait()
        self._here = None

    def fetch(self) -> None:
        """Start the copy back, if it is gone."""
        if self._here is not None:
            return
        self._here = torch.empty(len(self._host), dtype=torch.uint8, device=self._device)
        if self._streams is None:
            self._here.copy_(self._host)
            return
        _, back = self._streams
        # It has waited for the copy there, and what had that memory before may still be read.
        back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(back):
            self._here.copy_(self._host, non_blocking=True)
            self._copied = back.record_event()

    def here(self) -> Tensor:
        """The storage's bytes on the device."""
        returned = self._here is None or self._here.untyped_storage()._cdata != self._was.cdata
        self.fetch()
        assert self._here is not None
        if returned:
            self._wait()
        return self._here


class _View:
    """A tensor whose storage is on the host."""

    def __init__(self, moved: _Moved, tensor: Tensor) -> None:
        self._moved, self._dtype = moved, tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def restored(self) -> Tensor:
        here = self._moved.here()
        empty = torch.empty(0, dtype=self._dtype, device=here.device)
        return empty.set_(here.untyped_storage(), *self._place)


def _number(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)
