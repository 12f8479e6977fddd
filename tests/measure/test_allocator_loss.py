"""What a GPU's allocator loses: found by a search over limits, kept in profiles, left free by plans."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from galvatron.core.errors import InvalidInput
from galvatron.core.files.profiles import dump_profile, load_profile
from galvatron.core.spec import Cluster, LayerTime, ModelProfile, Training
from galvatron.families import load_cluster, load_model
from galvatron.measure import layers
from galvatron.measure.figures import Block
from galvatron.measure.layer_jobs.job import LayerJob
from galvatron.measure.layer_jobs.probes import LayerBytes, LayerFindings, LayerProbe, Variant
from galvatron.measure.layers import profile_model, profile_of
from galvatron.measure.rehearsal import least
from galvatron.measure.rehearsal.results import Measured
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.profiled import as_profiled
from galvatron.planner.plan.setup import request_for
from galvatron.processes.peers import Peers

GPU = torch.device("cuda", 0)


class Allocator:
    """In place of a GPU's: work takes ``tensors``, and runs short below ``needed`` bytes; unasked it takes more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tensors: int, needed: int, taken: int) -> None:
        self._tensors, self._needed, self.limit = tensors, needed, taken
        self._short, self.runs = 0, 0
        for name, found in (("max_memory_allocated", tensors), ("max_memory_reserved", taken)):
            monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(least, "shortages", lambda device: self._short)
        monkeypatch.setattr(least, "capped", self._capped)

    @contextmanager
    def _capped(self, device: torch.device, most: int) -> Iterator[None]:
        before, self.limit = self.limit, most
        yield
        self.limit = before

    def work(self) -> None:
        self.runs += 1
        if self.limit < self._tensors * 1.001:
            raise torch.OutOfMemoryError
        self._short += self.limit < self._needed


@pytest.mark.parametrize(
    ("needed", "taken", "found"),
    [
        (1_002, 1_300, 1_005),  # the least that is tried
        (1_015, 1_300, 1_020),
        (1_070, 1_300, 1_080),
        (1_200, 1_300, 1_300),  # more than is tried: what it takes when it may
        (1_002, 1_015, 1_005),  # what it takes by itself is below most limits
        (1_002, 1_003, 1_003),
    ],
)
def test_the_least_limit_without_shortages(
    needed: int, taken: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(monkeypatch, 1_000, needed, taken)
    assert least.least_bytes(allocator.work, GPU) == found
    assert allocator.limit == taken, "the limit is lifted"


def test_running_out_of_memory_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, 1_000, 1_002, 1_300)
    monkeypatch.setattr(least, "_MARGINS", (0.08, 0.0, 0.0, 0.0))
    assert least.least_bytes(allocator.work, GPU) == 1_080
    assert allocator.runs == 4, "one to see, two at 8%, one that runs out"


class OneOfTwo:
    """In place of the ranks that measure together."""

    def __init__(self, rank: int, device: torch.device = GPU) -> None:
        self.rank, self.device, self.met = rank, device, 0

    def report(self, done: int, steps: int, what: str) -> None: ...

    def meet(self) -> None:
        self.met += 1


def _rehearsing(jobs: list[LayerJob]) -> LayerJob:
    profile_model(load_model("bert-large", Training(sequence_length=32)), load_cluster("a100-8"))
    return jobs[-1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("problem", [None, torch.OutOfMemoryError("CUDA out of memory.\nTry …")])
def test_one_rank_rehearses_and_profiling_does_not_fail_with_it(
    jobs: list[LayerJob],
    rank: int,
    problem: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rehearsed: list[int] = []

    def rehearse(plan: Plan, number: int, *, device: torch.device, steps: int) -> Measured:
        rehearsed.append(number)
        if problem is not None:
            raise problem
        return Measured(
            state_bytes=0, forward_backward_bytes=95, optimizer_bytes=90, reserved_bytes=120, least_bytes=100,
            compute_s=math.nan, optimizer_s=math.nan,
        )  # fmt: skip

    monkeypatch.setattr("galvatron.measure.rehearsal.rehearse.rehearse_rank", rehearse)
    peers = OneOfTwo(rank)
    lost = _rehearsing(jobs)._lost(cast("Peers", peers))
    assert peers.met == 1
    if rank or problem is not None:
        assert lost is None
    else:
        assert lost == pytest.approx(0.05)
    assert len(rehearsed) == (0 if rank else 1)
    assert ("not measured: CUDA out of memory." in caplog.text) == (problem is not None and rank == 0)


def test_a_processor_rehearses_nothing(jobs: list[LayerJob]) -> None:
    assert _rehearsing(jobs)._lost(cast("Peers", OneOfTwo(0, torch.device("cpu")))) is None


def _findings(lost: float | None) -> LayerFindings:
    variant = Variant(layer="encoder", index=1, tp=1, sequence_parallel=False)
    blocks = {LayerProbe(variant=variant, samples=n): [Block((1e-2 * n, 2e-2 * n))] * 2 for n in (1, 2, 4, 8)}
    weighed = {variant: [LayerBytes(samples=n, saved=n, transient=n) for n in (1, 8)]}
    return LayerFindings(device="toy", blocks=blocks, memory=weighed, lost=lost)


def test_profiles_say_what_is_lost_and_two_hundredths_more(tmp_path: Path) -> None:
    model = load_model("bert-tiny", Training(sequence_length=32))
    assert profile_of(model, _findings(None)).fragmentation is None
    profile = profile_of(model, _findings(0.02))
    assert profile.fragmentation == pytest.approx(1 - 0.98 * 0.98, abs=1e-4)
    path = tmp_path / "some.toml"
    path.write_text(dump_profile(profile), encoding="utf-8")
    assert load_profile(path) == profile
    path.write_text(path.read_text().replace("fragmentation = 0.0", "fragmentation = 9.0"), encoding="utf-8")
    with pytest.raises(InvalidInput, match="fragmentation"):
        load_profile(path)


def _profile(lost: float | None) -> ModelProfile:
    time = LayerTime(layer="encoder", forward_s=2e-3, parameters=None)
    return ModelProfile(name="some", times=(time,), fragmentation=lost)


@pytest.mark.parametrize(("of_cluster", "of_profile", "then"), [(0.06, 0.1, 0.1), (0.06, None, 0.06), (0.0, 0.1, 0.0)])
def test_plans_leave_what_was_measured(
    of_cluster: float, of_profile: float | None, then: float, tmp_path: Path
) -> None:
    """Where nothing is lost (a processor, a stock program that has all of its memory) a profile changes nothing."""
    cluster = replace(load_cluster("a100-8"), fragmentation=of_cluster)
    path = tmp_path / "some.toml"
    path.write_text(dump_profile(_profile(of_profile)), encoding="utf-8")
    request = request_for("bert-large", cluster, {"profile": str(path), "precision": "fp32"})
    assert request.cluster.fragmentation == as_profiled(cluster, _profile(of_profile)).fragmentation == then
    usable = request.budget_bytes - cluster.reserved_bytes
    assert request.problem().budget == int(usable * (1 - then))


def test_a_profile_without_it_is_written_as_before() -> None:
    assert "fragmentation" not in json.dumps(_profile(None).to_dict())
    assert "fragmentation" not in dump_profile(_profile(None))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LayerJob]:
    """Those that were given to measure, in place of measuring."""
    found: list[LayerJob] = []

    def measured(job: LayerJob, progress: object) -> LayerFindings:
        found.append(job)
        return _findings(0.02)

    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path))
    monkeypatch.setattr(layers, "measured", measured)
    return found


def test_a_plan_with_room_is_rehearsed(jobs: list[LayerJob]) -> None:
    """It has more room than any allocator was seen to lose, and its iterations are short."""
    cluster = load_cluster("a100-8")
    profile_model(load_model("bert-huge-32", Training(sequence_length=512)), cluster)
    (job,) = jobs
    assert job.plan is not None
    usable = cluster.device.memory_bytes - cluster.reserved_bytes
    tensors = max(stage.memory_bytes - stage.memory.reserved for stage in job.plan.stages)
    assert 0.3 * usable < tensors <= 0.85 * usable
    assert job.plan.iteration_s < 2.5


def _none_lost() -> Cluster:
    return replace(load_cluster("a100-8"), fragmentation=0.0)


@pytest.mark.parametrize("cluster", [load_cluster("cpu-4"), _none_lost()], ids=["processors", "nothing is lost"])
def test_nothing_is_rehearsed_where_nothing_is_lost(jobs: list[LayerJob], cluster: Cluster) -> None:
    profile_model(load_model("bert-tiny", Training(sequence_length=32)), cluster)
    (job,) = jobs
    assert job.plan is None
