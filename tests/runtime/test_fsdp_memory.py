"""Where FSDP2's messages get their memory, with streams that only tell who is current: there is no GPU here. Which
results of reductions become gradients is FSDP2's own doing, watched on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from oracle import Case, batches, first_weights
from parity import plan_for
from ranks import ranks
from reducing import reduce
from small_models import LAYERS, config

from galvatron.runtime.data_parallel.fsdp_memory import FsdpAllGather, FsdpReduceScatter

CPU = torch.device("cpu")


class _Stream(str):
    """A name, and whom it waits for."""

    def __init__(self, name: str) -> None:
        self.waits: list[str] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waits.append(other)


class _Streams:
    """CUDA's, as far as they are used. Notes which one each tensor is taken from, and who else uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = _Stream("computing")
        self.taken: list[str] = []
        self.recorded: list[str] = []
        empty = torch.empty

        def noted(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self.taken.append(self.current)
            return empty(*size, dtype=dtype, device=device)

        monkeypatch.setattr(torch, "empty", noted)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.recorded.append(stream))

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def reduce(self, reduction: FsdpReduceScatter) -> None:
        """As FSDP2 does."""
        reduction.allocate((8,), dtype=torch.float32, device=CPU)
        with self.on(_Stream("reducing")):
            output = reduction.allocate((2,), dtype=torch.float32, device=CPU)
        assert output.shape == (2,)

    def gather(self, gathering: FsdpAllGather, stream: _Stream) -> list[str]:
        """As FSDP2 does; whom the stream it gathers on has waited for."""
        with self.on(stream):
            output = gathering.allocate((16,), dtype=torch.float32, device=CPU)
        assert output.shape == (16,)
        return stream.waits


def test_what_is_gathered_has_the_memory_of_activations_once_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    waits = streams.gather(FsdpAllGather(CPU), _Stream("gathering"))
    assert (streams.taken, waits) == (["computing"], ["computing"])


def test_what_is_gathered_on_the_computing_stream_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    waits = streams.gather(FsdpAllGather(CPU), streams.current)
    assert (streams.taken, waits) == (["computing"], [])


def test_what_is_gathered_is_taken_from_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    gathering = FsdpAllGather(CPU)
    streams.current = _Stream("another")
    gathering.expect()
    waits = streams.gather(gathering, _Stream("gathering"))
    assert (streams.taken, waits) == (["another"], ["another"])


def test_what_becomes_the_gradient_has_the_memory_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    streams.reduce(FsdpReduceScatter(CPU))
    assert (streams.taken, streams.recorded) == (["computing", "computing"], ["reducing"])


def test_what_is_only_added_to_it_is_free_for_the_next_reduction_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    reduction = FsdpReduceScatter(CPU)
    reduction.expect(stays=False)
    streams.reduce(reduction)
    assert (streams.taken, streams.recorded) == (["computing", "reducing"], [])


def test_the_stream_that_trains_counts_not_the_one_that_built(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    reduction = FsdpReduceScatter(CPU)
    streams.current = _Stream("another")
    reduction.expect(stays=True)
    streams.reduce(reduction)
    assert (streams.taken, streams.recorded) == (["another", "another"], ["reducing"])


@pytest.mark.parametrize("strategy", ["sdp4", "dp4+zero2", "dp2-sdp2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_is_expected_to_stay_becomes_the_gradient_and_nothing_else(strategy: str, micro_batches: int) -> None:
    stages = [[strategy] * LAYERS["bert"]]
    case = Case(config=config("bert"), stages=stages, batch=4 * micro_batches, micro_batches=micro_batches, steps=1)
    for layers in ranks(4).run(reduce, case, plan_for(case), first_weights(case), batches(case)[0]):
        assert len(layers) == LAYERS["bert"]
        for expected, became in layers:
            assert sum(expected) == 1
            assert expected == became
