"""Memory holds: what a rank really allocates is what the planner predicted, within 5%, over families and strategies.

And a rehearsal allocates what a real run does, in which all ranks take part.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from longer import longer
from ranks import ranks
from settled import settled

from galvatron.measure.rehearsal.rehearse import measure_rank, rehearse_rank
from galvatron.measure.rehearsal.results import Measured, Rehearsal
from galvatron.planner.plan.plan import Plan
from memory_table import CASES

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
_MORE = {
    "bert sdp4", "bert dp4+zero2", "llama tp4+sp", "t5 dp4", "swin dp2-tp2", "vit dp4+rc", "llama sdp4+rc",
    "bert tp4", "llama dp2-sdp2", "vit dp2-tp2", "gpt2 dp4+rc", "swin mixed", "gpt2 tp4 and dp4", "t5 pp2 gpipe",
    "gpt2 mixed", "llama tp2 and sdp4", "llama pp4 1f1b", "vit pp2 1f1b", "swin pp2 gpipe", "gpt2 sdp4", "gpt2 tp4+sp",
    "bert pp2 1f1b", "llama ring4", "llama ring2-tp2+sp", "llama sdp2-ulysses2", "llama divided graded",
    "llama fused loss tp2", "llama fused loss dp2", "vit pp2 gpipe", "gpt2 pp2 gpipe zero2", "narrow pp2 gpipe bf16",
    "t5 sdp2-tp2", "bert bf16 once", "bert bf16 dp4 once", "bert tp4 once",
}  # fmt: skip
"""Left to the longer run: the family has the strategy in a mixed plan or a pipeline, and another has it alone."""


@cache
def _plan(name: str) -> Plan:
    return CASES[name].plan()


@cache
def _rehearsed(name: str, rank: int) -> Measured:
    return rehearse_rank(_plan(name), rank, device=CPU, steps=0)


@pytest.mark.parametrize("name", [longer(name) if name in _MORE else name for name in CASES])
def test_peaks_are_as_predicted(name: str) -> None:
    plan = _plan(name)
    for stage in plan.stages:
        rank = stage.devices[0]
        found = Rehearsal.of(plan, rank, "cpu", _rehearsed(name, rank))
        assert found.memory_ratio == pytest.approx(1, abs=0.05), (
            f"rank {rank}: predicted {found.predicted_bytes:,} = {stage.memory}, measured {found.measured}"
        )


@pytest.mark.parametrize("name", [longer("gpt2 sdp4"), "bert mixed", longer("bert pp2 1f1b"), longer("gpt2 pp2 gpipe")])
def test_a_rehearsal_takes_what_a_real_run_takes(name: str) -> None:
    """Four processes joined by gloo, against the first rank of each stage alone. Mostly they agree to the byte; now and
    then the meter misses that a gradient summed by gloo was let go, so two of those are allowed."""
    plan = _plan(name)
    missed = 2 * plan.micro_batch * max(kind.boundary_bytes for kind in plan.model.kinds)
    real: list[Measured] = ranks(plan.cluster.devices).run(_real, plan)
    for stage in plan.stages:
        alone = _rehearsed(name, stage.devices[0])
        for rank in stage.devices:
            assert alone.peak_bytes == pytest.approx(real[rank].peak_bytes, rel=0.02), rank
            assert alone.state_bytes == pytest.approx(real[rank].state_bytes, abs=missed), rank


def _real(plan: Plan) -> Measured:
    with settled():
        return measure_rank(plan, device=CPU, steps=0)


def test_a_plan_for_more_devices_than_anyone_has() -> None:
    """A rank in the middle of 64, none of which exist, holds its 64th of the states and no more."""
    name = "llama sdp16-tp4"
    states = _plan(name).stages[0].memory.states
    assert states * 64 == pytest.approx(16 * _plan(name).model.parameters, rel=0.02)
    assert _rehearsed(name, 37).state_bytes == pytest.approx(states, rel=0.07)  # buffers, and shards of whole rows
