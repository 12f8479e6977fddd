"""The loader: no sample lost or repeated, whatever the batch size, the workers and the interruptions."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
import torch

from galvatron.core.errors import InvalidInput
from galvatron.train.data import Loader, Position
from galvatron.train.data.dataset import Sample

SIZE = 37


@dataclass
class Numbers:
    """Samples that say who they are, and what their generator drew."""

    size: int = SIZE
    fingerprint: str = "numbers"
    broken: int | None = None
    unread: dict[int, frozenset[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        if index == self.broken:
            raise InvalidInput(f"row {index} is broken")
        self.unread[index] = unread
        return {"index": torch.tensor(index), "drawn": torch.rand((), generator=generator)}


def rows(batch: Sample) -> list[tuple[int, float]]:
    return list(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True))


def interrupted(sessions: list[tuple[int, int, int]]) -> list[tuple[int, float]]:
    """What several loaders hand out, one resuming where the other stopped: (batches, batch size, workers) of each."""
    seen, start = [], None
    for batches, batch, workers in sessions:
        loader = Loader(Numbers(), batch=batch, workers=workers, start=start)
        for _ in range(batches):
            seen += rows(next(loader))
        start = Position.from_json(json.loads(json.dumps(loader.position.to_json())))
        assert start.samples_seen == len(seen), "batches made ahead do not count"
        loader.close()
    return seen


SESSIONS = [(3, 4, 0), (2, 8, 2), (1, 1, 1), (4, 5, 3), (1, 50, 2), (5, 3, 0), (1, 14, 2)]


def test_every_sample_once_an_epoch_through_resumes_batch_sizes_and_workers() -> None:
    seen = interrupted(SESSIONS)
    assert len(seen) >= 3 * SIZE
    for epoch in range(3):
        counts = Counter(index for index, _ in seen[epoch * SIZE : (epoch + 1) * SIZE])
        assert counts == Counter(range(SIZE)), f"epoch {epoch}"


def test_interruptions_change_nothing() -> None:
    """Order and random numbers are those of one uninterrupted loader of single samples."""
    loader = Loader(Numbers(), batch=1)
    seen = interrupted(SESSIONS)
    assert seen == [rows(next(loader))[0] for _ in seen]


def test_epochs_and_seeds_have_their_own_orders_and_random_numbers() -> None:
    first, second = (rows(batch) for batch in (next(loader) for loader in [Loader(Numbers(), batch=SIZE)] * 2))
    other = rows(next(Loader(Numbers(), batch=SIZE, seed=1)))
    orders = {tuple(index for index, _ in part) for part in (first, second, other)}
    drawn = {value for part in (first, second, other) for _, value in part}
    assert len(orders) == 3
    assert len(drawn) == 3 * SIZE


def test_unshuffled_is_in_order() -> None:
    loader = Loader(Numbers(size=5), batch=4, seed=None)
    assert [index for _ in range(2) for index, _ in rows(next(loader))] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert loader.epoch == 8 / 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "others"}, "read data set others, this one is numbers"),
        ({"seed": 3}, "seed 3, this one has 0"),
        ({"shuffle": False}, "shuffle False, this one has True"),
        ({"samples_seen": -1}, "samples_seen is -1"),
    ],
)
def test_resuming_with_something_else_is_refused(change: dict[str, object], said: str) -> None:
    saved = replace(Loader(Numbers(), batch=2).position, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=said):
        Loader(Numbers(), batch=2, start=saved)


@pytest.mark.parametrize("field", ["fingerprint", "seed", "shuffle", "samples_seen"])
def test_a_damaged_position_names_its_field(field: str) -> None:
    content: dict[str, object] = {**Loader(Numbers(), batch=2).position.to_json(), field: None}
    with pytest.raises(InvalidInput, match=f"{field} is None"):
        Position.from_json(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_is_named_and_the_workers_end(workers: int) -> None:
    before = threading.active_count()
    loader = Loader(Numbers(broken=9), batch=4, workers=workers)
    good: list[Sample] = []
    with pytest.raises(InvalidInput, match="row 9 is broken") as caught:
        good.extend(islice(loader, SIZE))  # keeps what came before the error
    assert "sample 9 of the data set, in epoch 0" in caught.value.__notes__[0]
    assert loader.position.samples_seen == 4 * len(good), "the broken batch was not handed out"
    with pytest.raises(InvalidInput, match="row 9"):
        next(loader)
    loader.close()
    assert threading.active_count() == before


def test_a_dropped_loader_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    loader = Loader(Numbers(), batch=4, workers=2)
    next(loader)
    workers = set(threading.enumerate()) - before
    assert workers
    del loader
    for worker in workers:
        worker.join(timeout=30)
        assert not worker.is_alive()


@pytest.mark.parametrize("workers", [0, 3])
def test_rows_that_are_not_read_are_told(workers: int) -> None:
    data = Numbers()
    reads = {"pixel_values": frozenset({1, 2}), "input_ids": frozenset(range(4))}
    loader = Loader(data, batch=4, seed=None, workers=workers, reads=reads)
    next(loader)
    skipped = frozenset({"pixel_values"})
    assert [data.unread[row] for row in range(4)] == [skipped, frozenset(), frozenset(), skipped]
    loader.close()


class _InParallel:
    """A data set whose samples are made by what PyTorch runs in threads of its own; all begin at once."""

    fingerprint = "in parallel"

    def __init__(self, workers: int) -> None:
        self._gate = threading.Barrier(workers)

    def __len__(self) -> int:
        return 8

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        self._gate.wait()
        return {"found": torch.isin(torch.arange(100), torch.arange(3)).sum()}


def test_workers_of_a_forked_process_can_begin_at_once() -> None:
    """PyTorch makes its threads anew there, and a second thread that began meanwhile found none: mostly so with 8."""
    torch.isin(torch.arange(10), torch.arange(3))
    torch.set_num_threads(torch.get_num_threads())  # there are threads that a fork leaves behind
    for _ in range(10):
        child = os.fork()
        if child == 0:
            try:
                next(Loader(_InParallel(8), batch=8, workers=8))
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_nothing_to_load_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no samples"):
        Loader(Numbers(size=0), batch=1)
    with pytest.raises(InvalidInput, match="batch 0"):
        Loader(Numbers(), batch=0)
