"""Switches: one declaration is what strategies, spaces, plans and both front doors know of each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast, get_type_hints

import pytest

import galvatron
from galvatron.cli.options import takes_setup
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import LAYER_SWITCHES, SWITCHES, Strategy, SwitchChoices, Switches
from galvatron.planner.plan.options import Setup, help_of, setup_fields
from galvatron.planner.plan.setup import request_for


def test_a_user_may_say_each_switch_and_nothing_else() -> None:
    names = [field.name for field in fields(Switches)]
    assert list(get_type_hints(SwitchChoices)) == names == [switch.name for switch in SWITCHES]
    assert set(names) < set(setup_fields())


def test_each_is_written_in_its_own_way() -> None:
    texts = [switch.text for switch in LAYER_SWITCHES]
    assert len(set(texts)) == len(texts)
    assert all(text.isalnum() and text.islower() for text in texts)
    assert str(Strategy.parse("dp2-tp2+zero2+sp+rc")) == "dp2-tp2+zero2+sp+rc"


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("dp2+sp", r"sequence parallelism \(\+sp\) needs a tp axis"),
        ("sdp2+zero2", "needs a dp or ring or ulysses axis and no sdp axis"),
    ],
)
def test_what_a_switch_lacks_is_said(text: str, needed: str) -> None:
    with pytest.raises(InvalidInput, match=needed):
        Strategy.parse(text)


def test_the_command_line_has_every_field_with_its_help() -> None:
    @takes_setup()
    def command(setup: Setup) -> None: ...

    assert list(command.__annotations__) == list(setup_fields())
    for name, option in command.__annotations__.items():
        assert option.__metadata__[0].help == help_of(name)


def test_an_option_that_does_not_exist_is_not_dropped() -> None:
    with pytest.raises(InvalidInput, match="'recomputing' is not an option of a plan; did you mean 'recompute'"):
        request_for("bert-base", "titan-rtx-8", cast("Setup", {"recomputing": True}))
    with pytest.raises(InvalidInput, match="'recomputing' is not an option"):
        cast("Any", galvatron.plan)("bert-base", "titan-rtx-8", recomputing=True)


def test_expert_parallelism_needs_a_space_with_ep() -> None:
    with pytest.raises(InvalidInput, match="--expert-parallel needs EP, which space 'dp\\+tp' does not hold"):
        galvatron.plan("bert-base", "titan-rtx-8", space="dp+tp", expert_parallel=True)
    off = galvatron.plan("bert-base", "titan-rtx-8", batch=8, expert_parallel=False)
    assert off == galvatron.plan("bert-base", "titan-rtx-8", batch=8), "a model without experts has no use for it"
    assert not off.space.expert_parallel


@pytest.mark.parametrize("name", ["zero2", "hybrid_sharding"])
def test_a_space_without_use_for_a_switch_refuses_it(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"--{name.replace('_', '-')} needs both DP and SDP, which space 'dp'"):
        cast("Any", galvatron.plan)("bert-base", "titan-rtx-8", space="dp", **{name: True})
