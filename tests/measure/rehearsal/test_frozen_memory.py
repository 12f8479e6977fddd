"""Memory of plans with frozen parameters: what a rank really allocates is what the planner predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from longer import longer

from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.families.tuning import freeze, tuned
from galvatron.measure.rehearsal.rehearse import rehearse_rank
from galvatron.measure.rehearsal.results import Rehearsal
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request
from memory_table import Case

pytestmark = pytest.mark.filterwarnings("ignore")

_FIRST = ("model.embed_tokens", "model.layers.[0-3]")
_LAST = ("lm_head", "model.layers.[2-5]")


def _plan(case: Case, frozen: tuple[str, ...]) -> Plan:
    whole = case.plan()
    spec = whole.model.spec()
    training = replace(spec.training, freeze=frozen)
    assert spec.config is not None
    model = build_meta(spec.config, spec.training)
    freeze(model, training)
    spec = tuned(spec, layered_model(model), training)
    request = Request(model=spec, cluster=whole.cluster.facts, batch=case.batch, schedule=case.schedule)
    return priced(request, case.stages, micro_batches=case.micro_batches)


@pytest.mark.parametrize(
    ("stages", "frozen", "above"),
    [
        longer([["dp4"] * 8], _FIRST, 1.07),
        ([["sdp4"] * 8], _FIRST, 1.07),
        longer([["dp4+zero2"] * 8], _FIRST, 1.07),
        longer([["tp4"] * 8], _FIRST, 1.07),
        ([["dp2+rc"] * 4, ["sdp2"] * 4], _FIRST, 1.08),
        longer([["dp4"] * 8], _LAST, 1.2),
        longer([["sdp4"] * 8], _LAST, 1.22),
        ([["dp4"] * 8], ("*mlp",), 1.2),
    ],
)
def test_peaks_are_as_predicted(stages: list[list[str]], frozen: tuple[str, ...], above: float) -> None:
    """States to the byte; in all no less than is taken, and more where gradients pass frozen projections: these do not
    save their inputs, which is not counted."""
    case = Case(family="llama", stages=tuple(map(tuple, stages)), micro_batches=2 * len(stages))
    plan = _plan(case, frozen)
    for stage in plan.stages:
        rank = stage.devices[0]
        found = Rehearsal.of(plan, rank, "cpu", rehearse_rank(plan, rank, device=torch.device("cpu"), steps=0))
        if "zero2" not in stages[0][0]:  # its whole copies are there from the first forward on
            assert found.measured.state_bytes == pytest.approx(stage.memory.states, rel=0.001)
        assert 0.95 < found.memory_ratio < above
