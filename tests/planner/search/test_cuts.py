"""Cuts against all compositions: what would break is a limit on the slowest stage lowered past the optimum."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from search_oracles import Rng, all_cuts

from galvatron.core.spec import GPIPE
from galvatron.planner.cost import Pace
from galvatron.planner.search.bounds import Floats
from galvatron.planner.search.cuts import CutMatrix, balanced_cuts, best_cuts


def _random_matrices(rng: Rng, layers: int, stages: int) -> list[CutMatrix]:
    """Stage times by end and width, a matrix a stage; with ties, stages that are impossible, and a limited width."""
    width = int(rng.integers(1, layers + 1))
    top = int(rng.choice([3, 20, 10**6]))
    matrices = []
    for _ in range(stages):
        matrix = rng.integers(0, top, (layers + 1, width + 1)).astype(np.float64)
        matrix[rng.random(matrix.shape) < rng.choice([0.0, 0.2, 0.5])] = np.inf
        ends, widths = np.indices(matrix.shape)
        matrix[(widths > ends) | (widths == 0)] = np.inf
        matrices.append(matrix)
    return matrices if rng.random() < 0.5 else [matrices[0]] * stages


def _objective(matrices: list[CutMatrix], positions: tuple[int, ...], micro_batches: int) -> float:
    times = []
    for matrix, (begin, end) in zip(matrices, pairwise(positions), strict=True):
        if end - begin >= matrix.shape[1]:
            return np.inf
        times.append(float(matrix[end, end - begin]))
    return np.inf if np.inf in times else sum(times) + (micro_batches - 1) * max(times)


@pytest.mark.parametrize("seed", range(4))
def test_best_cuts_equals_all_compositions(seed: int) -> None:
    """1200 cases of up to 9 layers, in up to 9 stages, with 1 to 64 micro-batches."""
    rng = np.random.default_rng(seed)
    feasible = 0
    for _ in range(300):
        layers = int(rng.integers(1, 10))
        stages = int(rng.integers(1, layers + 1))
        micro_batches = int(rng.choice([1, 2, 3, 8, 64]))
        matrices = _random_matrices(rng, layers, stages)
        least = min(_objective(matrices, positions, micro_batches) for positions in all_cuts(layers, stages))
        found = best_cuts(matrices, Pace.of(GPIPE, len(matrices), micro_batches), np.inf)
        assert (np.inf if found is None else found.objective) == least
        if found is not None:
            feasible += 1
            assert len(found.positions) == stages + 1
            assert _objective(matrices, found.positions, micro_batches) == least
            assert best_cuts(matrices, Pace.of(GPIPE, len(matrices), micro_batches), least) is None, (
                "the cutoff is exclusive"
            )
            again = best_cuts(matrices, Pace.of(GPIPE, len(matrices), micro_batches), least + 1)
            assert again is not None
            assert again.objective == least
    assert feasible > 100


def _heaviest(weights: Floats, positions: tuple[int, ...]) -> float:
    return max(float(weights[begin:end].sum()) for begin, end in pairwise(positions))


@pytest.mark.parametrize("seed", range(4))
def test_balanced_cuts_minimise_the_heaviest_stage(seed: int) -> None:
    """400 random weightings, zeros and ties among them; every stage keeps at least one layer."""
    rng = np.random.default_rng((2, seed))
    for _ in range(100):
        layers = int(rng.integers(1, 10))
        stages = int(rng.integers(1, layers + 1))
        weights = rng.integers(0, int(rng.choice([2, 5, 1000])), layers).astype(np.float64)
        positions = balanced_cuts(weights, stages)
        assert positions in set(all_cuts(layers, stages))
        least = min(_heaviest(weights, cuts) for cuts in all_cuts(layers, stages))
        assert _heaviest(weights, positions) == least


def test_balanced_cuts_spread_what_the_heaviest_stage_leaves() -> None:
    """One heavy layer decides the heaviest stage; the others are still divided evenly (not 1, 1 and 7)."""
    weights = np.array([9.0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    assert balanced_cuts(weights, 4) == (0, 1, 4, 7, 10)


def test_balanced_cuts_do_not_depend_on_the_unit_of_the_weights() -> None:
    """Seconds and nanoseconds, bytes and MiB give the same stages: no absolute tolerance is left in the code."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        weights = rng.random(12)
        stages = int(rng.integers(1, 7))
        assert balanced_cuts(weights, stages) == balanced_cuts(weights * 2.0**40, stages)
        assert balanced_cuts(weights, stages) == balanced_cuts(weights * 2.0**-40, stages)
