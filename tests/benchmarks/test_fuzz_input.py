"""Some of the fuzzer's cases in every run of the tests, and that it finds what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz_input import Workbench, fuzz

_SEEDS = range(100)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("fuzz"), with_torch=False)


def _defects(seeds: range, bench: Workbench) -> list[str]:
    outcomes = fuzz(seeds, bench)
    return [f"seed {own.seed}: {own.kind}: {own.said}" for own in outcomes if own.kind not in ("done", "refused")]


def test_some_cases(bench: Workbench) -> None:
    wrong = _defects(_SEEDS, bench)
    assert not wrong, "\n".join(wrong)


def test_nothing_is_written_where_the_fuzzer_was_started(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ("plan", "bert-tiny", "--cluster", "cpu-4", "--batch", "8", "--output", "here[1].json")
    monkeypatch.setattr(bench, "case", lambda seed: (case, "a relative name"))
    monkeypatch.chdir(tmp_path)
    assert not _defects(range(1), bench)
    assert not list(tmp_path.iterdir())
    assert (bench.folder / "here[1].json").exists()


@pytest.mark.slow
def test_more_cases(bench: Workbench) -> None:
    wrong = _defects(range(1000, 2000), bench)
    assert not wrong, "\n".join(wrong)


def test_the_cases_have_everything(bench: Workbench) -> None:
    """Otherwise the seeds would promise more than they try."""
    drawn = [bench.case(seed) for seed in range(400)]
    assert {args[0] for args, _ in drawn} >= {"plan", "explain", "compare", "models", "clusters", "checkpoints"}
    for strange in ("pipe", "device", "folder", "deep", "NUL", "delete .", "value .", "--memory"):
        assert any(strange in what for _, what in drawn), strange


def test_a_traceback_a_wrong_status_and_a_wrong_plan_are_found(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fuzz_input

    def broken() -> None:
        raise RecursionError

    def quiet() -> None:
        raise SystemExit(1)

    monkeypatch.setattr(fuzz_input, "command", broken)
    (found,) = fuzz([0], bench)
    assert (found.kind, found.said.partition(":")[0]) == ("traceback", "RecursionError")
    monkeypatch.setattr(fuzz_input, "command", quiet)
    (found,) = fuzz([0], bench)
    assert (found.kind, found.status) == ("status", 1)


def test_a_file_that_never_ends_is_found(bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    import fuzz_input

    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(fuzz_input, "_NEVER_S", 0.3)
    monkeypatch.setattr(fuzz_input, "command", lambda: (tmp_path / "pipe").read_text())
    (found,) = fuzz([0], bench)
    assert (found.kind, found.said) == ("slow", "not ended after 0.3 s")
