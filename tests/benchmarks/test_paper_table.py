"""The cost model against the paper's main table: 256 measured cells it has to predict with one profile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from longer import longer

from galvatron.core.spec import Attention, Training
from galvatron.families import load_model, load_profile
from paper_table import SPACES, Criteria, predict, read_cells


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the table, by memory and models, and what must hold of it."""

    memories: tuple[int, ...]
    models: tuple[str, ...] = ("",)
    """The ends of their names."""
    memory_right: int
    """At least; of 8 cells for each budget and model."""
    pure: int
    batches_right: int
    """At least; of the pure strategies'."""
    ran: int
    """Without DeepSpeed-3D's."""


_PARTS = (
    Part(memories=(16,), models=("ViT-Huge-48", "T5-Large-48"), memory_right=15, pure=5, batches_right=5, ran=11),
    Part(memories=(8, 16), memory_right=123, pure=41, batches_right=37, ran=80),
    Part(memories=(12, 20), memory_right=127, pure=54, batches_right=53, ran=101),
)


@pytest.fixture(scope="module", params=[_PARTS[0], *map(longer, _PARTS[1:])], ids=["two-models", "8-16", "12-20"])
def part(request: pytest.FixtureRequest) -> Part:
    found: Part = request.param
    return found


@pytest.fixture(scope="module")
def criteria(part: Part) -> Criteria:
    cells = [cell for cell in read_cells() if cell.memory_gib in part.memories and cell.model.endswith(part.models)]
    return Criteria(tuple(predict(cell) for cell in cells))


def test_the_table_is_whole() -> None:
    cells = read_cells()
    assert len({(cell.memory_gib, cell.strategy, cell.model) for cell in cells}) == len(cells) == 256
    assert {cell.strategy for cell in cells} == set(SPACES)
    assert sum(cell.throughput is None for cell in cells) == 45


def test_what_runs_out_of_memory(criteria: Criteria, part: Part) -> None:
    assert criteria.memory_right >= part.memory_right


def test_batches_of_the_pure_strategies(criteria: Criteria, part: Part) -> None:
    assert len(criteria.pure) == part.pure
    assert criteria.batches_right >= part.batches_right
    assert criteria.largest_batch_miss <= 8


def test_throughput_at_the_papers_batches(criteria: Criteria, part: Part) -> None:
    assert len(criteria.absolute_errors) == part.ran  # no cell is left out
    assert criteria.median_error <= 0.06
    assert criteria.high_error <= 0.13


def test_ours_is_at_least_as_fast_as_every_baseline(criteria: Criteria, part: Part) -> None:
    assert criteria.cells_led == len({(own.cell.memory_gib, own.cell.model) for own in criteria.predictions})


def test_swin_runs_at_the_rate_of_vit() -> None:
    """Its times are no constants of their own: operations at the rate fitted to ViT's one layer."""
    training = Training(attention=Attention.PAPER)
    rates = []
    for name in ("vit-huge", "swin-huge"):
        operations = {kind.name: kind.forward_flops for kind in load_model(f"{name}-32", training).kinds}
        rates += [operations[time.layer] / time.forward_s for time in load_profile(f"titan-rtx-{name}").times]
    assert len(rates) == 5
    assert rates == pytest.approx([rates[0]] * 5, rel=0.001)
