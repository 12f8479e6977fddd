"""Some of the fuzzer's cases in every run of the tests, and that it finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks

from fuzz_training import Drawn, draw, fuzz
from galvatron.core.spec import Strategy

_SEEDS = range(40)
_SHORT = (7, 10, 13, 18, 20)
"""Cheap ones; the longer run has all."""
_PAIRS = (1, 2, 4, 5, 6, 9, 11, 14, 15, 18, 22, 23, 26, 28, 29, 31, 32, 37, 41, 45, 46, 47, 49, 55)
"""Cheap ones on two ranks at most, all 13 models among them."""
_DIVIDED = (1, 4, 7, 22, 27, 33)
"""… whose sequences are divided: of some models, with rings and Ulysses, parts recomputed, padding and freezing."""


_ARCHITECTURES = (1001,)
"""A cheap one of any architecture."""


_ADAPTERS = (3, 17)
"""Cheap ones with adapters of peft, the last with modules that train in full."""
_CHANGES = (8, 18)
"""Cheap ones of models that were changed in memory, and run so."""


def _run(world: int, *args: Any) -> list[Any]:
    return ranks(world).run(*args)


def _equal(seeds: tuple[int, ...], most: int = 4, **kind: bool) -> None:
    found = fuzz(seeds, _run, most, **kind)
    wrong = [f"seed {own.seed}: {own.kind}: {own.said}" for own in found if own.kind != "equal"]
    assert not wrong, "\n".join(wrong)


def test_some_cases() -> None:
    _equal(_SHORT)


@pytest.mark.parametrize("part", range(2))
def test_cases_on_two_ranks(part: int) -> None:
    _equal(_PAIRS[part::2], most=2)


def test_divided_sequences() -> None:
    _equal(_DIVIDED, most=2, context=True)


def test_architectures() -> None:
    _equal(_ARCHITECTURES, architectures=True)


def test_adapters() -> None:
    _equal(_ADAPTERS, most=2, adapters=True)


def test_changes() -> None:
    _equal(_CHANGES, most=2, changes=True)


@pytest.mark.slow
def test_more_changes() -> None:
    """What is not equal must be refused by name."""
    found = fuzz(range(60), _run, 2, changes=True)
    wrong = [f"seed {own.seed}: {own.kind}: {own.said}" for own in found if own.kind not in ("equal", "refused")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_adapters_of_architectures() -> None:
    """In some blocks only, in vision towers and in heads."""
    _equal((202, 204, 208, 218), adapters=True, architectures=True)


@pytest.mark.slow
def test_more_architectures() -> None:
    _equal(tuple(range(1000, 1040)), architectures=True)


@pytest.mark.slow
def test_more_divided_sequences() -> None:
    _equal(tuple(range(40)), context=True)


@pytest.mark.slow
def test_more_cases() -> None:
    _equal(tuple(seed for seed in _SEEDS if seed not in _SHORT))


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's own loss doubled: everything else is as it was."""
    import fuzz_training

    stock = fuzz_training._stock_loss
    monkeypatch.setattr(fuzz_training, "_stock_loss", lambda *args, **options: 1.001 * stock(*args, **options))
    (found,) = fuzz([_SHORT[0]], _run, 4)
    assert (found.kind, found.said.partition(" ")[0]) == ("different", "losses")


@pytest.mark.slow
def test_the_cases_have_everything() -> None:
    """Otherwise the seeds would promise more than they try."""
    cases: list[Drawn] = [draw(seed) for seed in range(60)]
    strategies = [Strategy.parse(text) for case in cases for stage in case.stages for text in stage]
    assert len({case.stock for case in cases}) == 13
    assert len({case.optimizer for case in cases}) == 10
    assert {len(case.stages) for case in cases} >= {1, 2, 4}
    assert {case.clip for case in cases} == {"", "own", "habit"}
    assert len({case.frozen for case in cases}) == 6
    assert any(own.zero2 for own in strategies)
    assert any(own.fused_loss for own in strategies)
    assert any(own.sequence_parallel and own.recompute for own in strategies)
