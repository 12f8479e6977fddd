"""What people see of a profile."""

from __future__ import annotations

from rich.console import Console

from galvatron.core.spec import LayerTime, ModelProfile
from galvatron.planner.plan.tables import profile_view


def _shown(time: LayerTime) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(profile_view(ModelProfile(name="p", times=(time,))))
    return captured.get()


def test_a_least_time_is_shown_where_it_matters() -> None:
    line = {"layer": "encoder", "forward_s": 2e-3, "forward_fixed_s": 1e-3, "backward_fixed_s": 1e-3}
    shown = _shown(LayerTime(**line, forward_least_s=9e-3))  # type: ignore[arg-type]
    assert "2 ms + 1 ms, at least 9 ms" in shown.replace(".00", "")
    assert "at least" not in _shown(LayerTime(**line, forward_least_s=2e-3))  # type: ignore[arg-type]


def test_ways_to_split_a_layer_are_told_apart() -> None:
    line = {"layer": "head", "forward_s": 2e-3}
    for way, expected in (
        ({"fused_loss": True}, "1+fl"),
        ({"tp": 2, "sequence_parallel": True}, "2+sp"),
        ({"ep": 4}, "1/ep4"),
    ):
        assert f" {expected} " in _shown(LayerTime(**line, **way))  # type: ignore[arg-type]
