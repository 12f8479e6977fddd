"""Held-out samples: a fixed part, and batches that count each of them once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED
from galvatron.train.data import evaluation_batches, split
from galvatron.train.data.dataset import Sample
from galvatron.train.data.order import generator_of


@dataclass
class Numbers:
    size: int
    fingerprint: str = "numbers"

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        return {"x": torch.rand((), generator=generator), "labels": torch.tensor([index])}


@pytest.mark.parametrize("size", [2, 3, 10, 97, 100])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 1 / 3, 0.5, 0.9])
def test_parts_are_disjoint_complete_and_even(size: int, fraction: float) -> None:
    if round(size * fraction) >= size:
        return
    train, held = split(Numbers(size), fraction)
    chosen = [train.index(number) for number in range(len(train))]
    kept = [held.index(number) for number in range(len(held))]
    assert sorted(chosen + kept) == list(range(size))
    assert len(kept) == max(1, round(size * fraction))
    spread = [(number + 0.5) / len(kept) * size for number in range(len(kept))]
    assert all(abs(even - index) <= 0.5 * size / len(kept) + 1 for even, index in zip(spread, kept, strict=True))
    assert len({train.fingerprint, held.fingerprint, "numbers"}) == 3


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 0.999, float("nan")])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(InvalidInput, match="evaluation"):
        split(Numbers(5), fraction)


@pytest.mark.parametrize(("batch", "most"), [(4, None), (5, None), (16, None), (4, 6)])
def test_evaluation_counts_each_sample_once(batch: int, most: int | None) -> None:
    batches = list(evaluation_batches(Numbers(10), batch=batch, most=most))
    assert all(own["labels"].shape == (batch, 1) and own["x"].shape == (batch,) for own in batches)
    labels = torch.cat([own["labels"] for own in batches]).flatten()
    assert labels[labels != IGNORED].tolist() == list(range(most or 10))
    again = list(evaluation_batches(Numbers(10), batch=batch, most=most))
    assert all(torch.equal(one["x"], two["x"]) for one, two in zip(batches, again, strict=True))


def test_held_out_samples_may_be_shown_differently() -> None:
    train, held = split(Numbers(10), 0.2, evaluated=Numbers(10, "plain"))
    assert train.fingerprint.startswith("numbers")
    assert held.fingerprint.startswith("plain")
    assert held.sample(1, generator_of(0))["labels"].item() == held.index(1)


def test_data_with_a_period_has_all_of_it_in_both_parts() -> None:
    train, held = split(Numbers(1000), 0.1)
    for part in (train, held):
        assert {part.index(number) % 10 for number in range(len(part))} == set(range(10))
