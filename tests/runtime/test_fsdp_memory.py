"""Where FSDP2's messages get their memory, with streams that only tell who is current: there is no GPU here. Which
results of reductions become gradients is FSDP2's own doing, watched on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import Case, batches, first_weights
from parity import plan_for
from ranks import ranks
from reducing import reduce
from small_models import LAYERS, config

from galvatron.runtime.data_parallel import fsdp_memory
from galvatron.runtime.data_parallel.fsdp_memory import FsdpAllGather, FsdpReduceScatter, in_backward

CPU = torch.device("cpu")


class _Stream(str):
    """A name, what it was told to do, and how much of what another was told it waits for."""

    def __init__(self, name: str) -> None:
        self.told = 0
        self.waits: list[tuple[str, int]] = []

    def record_event(self) -> tuple[str, int]:
        return self, self.told

    def wait_event(self, event: tuple[str, int]) -> None:
        self.waits.append(event)


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

    def gather(self, gathering: FsdpAllGather) -> list[tuple[str, int]]:
        """As FSDP2 does; what the stream that it gathers on has waited for."""
        with self.on(_Stream("gathering")):
            stream = self.current
            output = gathering.allocate((16,), dtype=torch.float32, device=CPU)
        assert output.shape == (16,)
        return stream.waits


def _gathering(*, whole: bool = False) -> FsdpAllGather:
    return FsdpAllGather(CPU, lambda: whole)


def test_what_is_gathered_has_the_memory_of_activations_once_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    streams.current.told = 5
    assert streams.gather(_gathering()) == [("computing", 5)]
    assert streams.taken == ["computing"]


def test_what_is_gathered_on_the_computing_stream_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    _gathering().allocate((16,), dtype=torch.float32, device=CPU)
    assert (streams.taken, streams.current.waits) == (["computing"], [])


def test_what_is_gathered_is_taken_from_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _Streams(monkeypatch)
    gathering = _gathering()
    streams.current = _Stream("another")
    gathering.expect()
    assert streams.gather(gathering) == [("another", 0)]
    assert streams.taken == ["another"]


@pytest.mark.parametrize("case", ["forward", "backward", "whole", "forgotten", "before each forward"])
def test_forward_takes_memory_a_layer_early(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """But for what is gathered already, and none is left taken when backward begins."""
    streams = _Streams(monkeypatch)
    monkeypatch.setattr(fsdp_memory, "in_backward", lambda: case == "backward")
    second = _gathering(whole=case == "whole")
    first = _gathering()
    first.following = [second]
    assert streams.gather(second) == [("computing", 0)], "how much it is shows here"
    streams.current.told = 1
    assert streams.gather(first) == [("computing", 1)]
    streams.current.told = 2
    if case == "forgotten":
        second.forget()
    if case == "before each forward":
        second.expect()
    assert streams.gather(second) == [("computing", 1 if case == "forward" else 2)]
    early = case not in ("backward", "whole")
    assert len(streams.taken) == 3 + (early and case != "forward")
    assert streams.gather(second) == [("computing", 2)], "it is used once"


def test_backward_is_told_from_forward() -> None:
    seen = []
    leaf: Any = torch.ones(1, requires_grad=True)
    double = leaf * 2
    double.register_hook(lambda _: seen.append(in_backward()))
    seen.append(in_backward())
    double.sum().backward()
    seen.append(in_backward())
    assert seen == [False, True, False]


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
