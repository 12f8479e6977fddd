"""Endless batches from a data set, and the place in them to resume from.

The samples of a run are one long sequence: a permutation of the data set for epoch 0, another for epoch 1, and so on.
Batches are cut from it without regard to epochs, so a place is just the number of samples before it. It means the same
for every batch size, number of ranks and number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from galvatron.core.errors import InvalidInput
from galvatron.train.data.dataset import Dataset, Sample, collate
from galvatron.train.data.order import generator_of, shuffled

__all__ = ["Loader", "Position"]

_AHEAD = 2
"""Batches under way while one is trained, with workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in a run's sequence of samples."""

    fingerprint: str
    """Of the data set."""
    seed: int
    shuffle: bool
    samples_seen: int
    """Samples in the batches that were handed out."""

    @classmethod
    def start(cls, dataset: Dataset, seed: int | None) -> Self:
        """Of a run that has seen nothing; ``seed`` None: samples come in their own order."""
        return cls(fingerprint=dataset.fingerprint, seed=seed or 0, shuffle=seed is not None, samples_seen=0)

    def check_same(self, saved: Position) -> None:
        """Raise :class:`InvalidInput` if ``saved`` is no place in the same sequence of samples."""
        if saved.fingerprint != self.fingerprint:
            raise InvalidInput(
                f"resume: the saved run read data set {saved.fingerprint}, this one is {self.fingerprint}; give the "
                "same files, tokenizer, sequence length and held-out fraction, or start a new run"
            )
        for name in ("seed", "shuffle"):
            if getattr(saved, name) != getattr(self, name):
                raise InvalidInput(
                    f"resume: the saved run read its data with {name} {getattr(saved, name)}, this one has "
                    f"{getattr(self, name)}; give the saved one, so that no sample is lost or repeated"
                )
        if saved.samples_seen < 0:
            raise InvalidInput(f"position in the data: samples_seen is {saved.samples_seen}; expected at least 0")

    def to_json(self) -> dict[str, str | int]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """What :meth:`to_json` wrote."""
        kinds: dict[str, type] = {"fingerprint": str, "seed": int, "shuffle": bool, "samples_seen": int}
        if not isinstance(content, Mapping):
            raise InvalidInput(f"position in the data: {content!r:.60} given; expected {', '.join(kinds)}")
        for field in fields(cls):
            value: Any = content.get(field.name)
            if type(value) is not kinds[field.name]:
                raise InvalidInput(
                    f"position in the data: {field.name} is {value!r}; expected {kinds[field.name].__name__}"
                )
        if content["samples_seen"] < 0:
            raise InvalidInput(f"position in the data: samples_seen is {content['samples_seen']}; expected 0 or more")
        return cls(**{name: content[name] for name in kinds})


class Loader:
    """An endless iterator of batches of ``batch`` rows, the same on every rank.

    ``workers`` threads make samples ahead of time; with none they are made when asked for. Threads, not processes:
    decoding and resizing images release Python's lock, text is a copy from a mapped file, and forking beside CUDA and
    NCCL threads breaks them. ``reads`` names, for an input, the rows that this rank reads
    (``ParallelModel.rows_read()``); of other rows it need not be decoded. ``start`` is where an earlier loader stopped.
    ``seed``: of the order; None: samples come in their own order.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch: int,
        seed: int | None = 0,
        workers: int = 0,
        start: Position | None = None,
        reads: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        if batch < 1 or workers < 0:
            raise InvalidInput(f"loader: batch {batch}, workers {workers}; expected at least 1 and at least 0")
        if not len(dataset):
            raise InvalidInput("loader: the data set has no samples; give more data")
        beginning = Position.start(dataset, seed)
        if start is not None:
            beginning.check_same(start)
        self._dataset, self._batch, self._beginning = dataset, batch, beginning
        self._seen = self._scheduled = 0 if start is None else start.samples_seen
        self._unread = [
            frozenset(name for name, rows in (reads or {}).items() if row not in rows) for row in range(batch)
        ]
        self._workers = workers
        if workers:
            # In a forked process PyTorch makes its threads anew at first use, which two threads must not begin at once
            # ("Invalid thread pool").
            torch.set_num_threads(torch.get_num_threads())
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="galvatron-data") if workers else None
        self._ahead: deque[list[Future[list[Sample]]]] = deque()

    @property
    def position(self) -> Position:
        """The place after the last batch that was handed out; batches made ahead do not count."""
        start = self._beginning
        return Position(fingerprint=start.fingerprint, seed=start.seed, shuffle=start.shuffle, samples_seen=self._seen)

    @property
    def epoch(self) -> float:
        """How often the whole data set has been seen."""
        return self._seen / len(self._dataset)

    def indices(self, first: int, count: int) -> list[tuple[int, int]]:
        """(epoch, index of the data set) of the samples from place ``first`` of the sequence on."""
        size, found = len(self._dataset), []
        while count:
            epoch, place = divmod(first, size)
            part = min(count, size - place)
            places = np.arange(place, place + part)
            order = shuffled(places, size, self._beginning.seed, epoch) if self._beginning.shuffle else places
            found += [(epoch, int(index)) for index in order]
            first, count = first + part, count - part
        return found

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sample:
        if self._pool is None:
            rows = self._make(self.indices(self._seen, self._batch), range(self._batch))
        else:
            while len(self._ahead) <= _AHEAD:
                self._ahead.append(self._submit(self._pool))
            rows = [row for part in self._ahead[0] for row in part.result()]
            self._ahead.popleft()
        self._seen += self._batch
        return collate(rows)

    def close(self) -> None:
        """End the workers; samples under way are finished, no more are begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor) -> list[Future[list[Sample]]]:
        indices = self.indices(self._scheduled, self._batch)
        self._scheduled += self._batch
        parts = [rows for rows in np.array_split(np.arange(self._batch), self._workers) if len(rows)]
        return [
            pool.submit(self._make, indices[part[0] : part[-1] + 1], range(part[0], part[-1] + 1)) for part in parts
        ]

    def _make(self, indices: list[tuple[int, int]], rows: range) -> list[Sample]:
        samples = []
        for (epoch, index), row in zip(indices, rows, strict=True):
            generator = generator_of(self._beginning.seed, epoch, index)
            try:
                samples.append(self._dataset.sample(index, generator, self._unread[row]))
            except Exception as error:
                error.add_note(f"while making sample {index} of the data set, in epoch {epoch}")
                raise
        return samples
