"""Plans for this machine: what is measured for them, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Cluster, ModelProfile, ModelSpec
from galvatron.families import load_cluster, load_profile
from galvatron.measure import auto
from galvatron.planner.plan.setup import Setup
from galvatron.processes.job import Progress

_PROFILE = "titan-rtx-bert-huge"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured and shown, in order; nothing really is."""
    seen: list[str] = []

    def profile_cluster(devices: int | None, *, fresh: bool, progress: Progress | None) -> Cluster:
        assert progress is not None
        seen.append(f"cluster of {devices}" + " anew" * fresh)
        return load_cluster("cpu-4")

    def profile_model(model: ModelSpec, cluster: Cluster, *, fresh: bool, progress: Progress | None) -> ModelProfile:
        assert progress is not None
        seen.append(f"{model.name} on {cluster.name}" + " anew" * fresh)
        return load_profile(_PROFILE)

    monkeypatch.setattr(auto, "profile_cluster", profile_cluster)
    monkeypatch.setattr(auto, "profile_model", profile_model)
    return seen


def test_devices_then_layers_each_with_its_own_progress(events: list[str]) -> None:
    @contextmanager
    def measuring(what: str) -> Iterator[Progress]:
        events.append(f"{what} begins")
        yield lambda done, total, now: None
        events.append(f"{what} ends")

    request = auto.request_here("bert-huge-32", Setup(batch=8), devices=3, measuring=measuring)
    assert events == [
        *("devices and links begins", "cluster of 3", "devices and links ends"),
        *("layers begins", "bert-huge-32 on cpu-4", "layers ends"),
    ]
    assert request.profile == load_profile(_PROFILE)
    assert request.batch == 8


def test_nothing_is_measured_for_a_name_that_is_no_models(events: list[str]) -> None:
    with pytest.raises(InvalidInput, match="unknown model 'bert-hug-32'; did you mean bert-huge-32"):
        auto.request_here("bert-hug-32", Setup(batch=8))
    with pytest.raises(InvalidInput, match="use at most 512"):
        auto.request_here("bert-huge-32", Setup(batch=8, sequence_length=4096))
    assert not events


def test_layers_with_a_profile_are_not_measured(events: list[str]) -> None:
    @contextmanager
    def measuring(what: str) -> Iterator[Progress]:
        yield lambda done, total, now: None

    request = auto.request_here("bert-huge-32", Setup(profile=_PROFILE), measuring=measuring)
    assert events == ["cluster of None"]
    assert request.profile == load_profile(_PROFILE)


def test_both_are_measured_again_where_that_is_asked_for(events: list[str]) -> None:
    @contextmanager
    def measuring(what: str) -> Iterator[Progress]:
        yield lambda done, total, now: None

    auto.request_here("bert-huge-32", Setup(batch=8), measuring=measuring, fresh=True)
    assert events == ["cluster of None anew", "bert-huge-32 on cpu-4 anew"]
