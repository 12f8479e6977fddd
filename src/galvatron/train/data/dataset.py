"""What a data set is to the loader: a number of samples, each made from its index and a generator of random numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED
from galvatron.train.data.order import generator_of, mixed

__all__ = ["Dataset", "Part", "Sample", "collate", "evaluation_batches", "split"]

Sample = dict[str, Tensor]
"""One sample's inputs and labels by Hugging Face's names, or many samples with rows first; shapes never vary."""

_NONE: frozenset[str] = frozenset()


class Dataset(Protocol):
    """A sample is a function of (index, the generator's seed) alone, so any process makes the same one at any time.

    :meth:`sample` may be called from several threads at once.
    """

    @property
    def fingerprint(self) -> str:
        """Equal for equal data: index i means the same sample, wherever and whenever the data set was opened."""

    def __len__(self) -> int: ...

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = _NONE) -> Sample:
        """Sample ``index``; values of ``unread`` inputs may be anything of the right shape, nobody will look at them.

        ``generator`` is for whatever is to differ from epoch to epoch: masks, crops.
        """


@dataclass(frozen=True)
class Part:
    """The training part or the held-out part of a data set: its indices are a function of its size and the share.

    The data set is cut into as many runs as samples are held out, and each run gives one: each class of a sorted folder
    has its share. Which one it gives is random, so that data with a period of its own has no part that is never chosen.
    """

    whole: Dataset
    held: int
    """Number of held-out samples."""
    held_out: bool
    """Whether this is the held-out part."""

    @property
    def fingerprint(self) -> str:
        return f"{self.whole.fingerprint}-{'held' if self.held_out else 'without'}{self.held}"

    def __len__(self) -> int:
        return self.held if self.held_out else len(self.whole) - self.held

    def index(self, number: int) -> int:
        """The index in the whole data set of this part's sample ``number``."""
        if self.held_out:
            return self._first(number) + self._given(number)
        # Before run j there are as many others as samples, less the j that are held out.
        run = bisect_right(range(self.held), number, key=lambda j: self._first(j) - j) - 1
        place = number - (self._first(run) - run)
        return self._first(run) + place + (place >= self._given(run))

    def _first(self, run: int) -> int:
        """Where a run begins."""
        return run * len(self.whole) // self.held

    def _given(self, run: int) -> int:
        """The place in a run of its held-out sample."""
        return mixed(run) % (self._first(run + 1) - self._first(run))

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = _NONE) -> Sample:
        return self.whole.sample(self.index(index), generator, unread)


def split(dataset: Dataset, fraction: float, *, evaluated: Dataset | None = None) -> tuple[Part, Part]:
    """The training part and the held-out part, the same in every run.

    ``evaluated``: the same samples as they are evaluated (images without augmentation), if that differs.
    """
    if not 0 < fraction < 1:
        raise InvalidInput(f"evaluation: the held-out fraction is {fraction}; expected a number between 0 and 1")
    held = max(1, round(len(dataset) * fraction))
    if held >= len(dataset):
        raise InvalidInput(
            f"evaluation: holding out {fraction} of {len(dataset)} samples leaves none to train on; hold out less, or "
            "give more data"
        )
    return Part(dataset, held, False), Part(evaluated or dataset, held, True)


def collate(samples: Sequence[Sample]) -> Sample:
    """Samples as the rows of one batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def evaluation_batches(dataset: Dataset, *, batch: int, most: int | None = None) -> Iterator[Sample]:
    """Every sample once, or the first ``most`` of them, in whole batches that are the same each time.

    A plan takes whole batches only, so the last one is filled up with rows whose labels do not count; weigh each
    batch's mean loss by its number of targets.
    """
    size = len(dataset) if most is None else min(most, len(dataset))
    for first in range(0, size, batch):
        rows = [dataset.sample(index, generator_of(0, index)) for index in range(first, min(first + batch, size))]
        filler = {**rows[0], "labels": torch.full_like(rows[0]["labels"], IGNORED)}
        yield collate(rows + [filler] * (batch - len(rows)))
