"""Settings are checked before anything starts, and read back as they were."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.train.settings import Decay, Settings, learning_rate


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"steps": 0}, "steps: 0"),
        ({"learning_rate": 0.0}, "learning-rate: 0.0"),
        ({"learning_rate": math.nan}, "learning-rate: nan"),
        ({"clip": -1.0}, "clip: -1.0"),
        ({"keep": 0}, "keep: 0"),
        ({"timeout_s": 0.0}, "timeout: 0.0"),
        ({"final_rate": 1.5}, "final-rate: 1.5"),
        ({"betas": (0.9, 1.0)}, "betas: (0.9, 1.0)"),
        ({"steps": 5, "warmup": 6}, "warmup: 6"),
        ({"evaluate_every": 2, "held_out": 0.0}, "held-out: 0"),
        ({"save_every": 0}, "save-every: 0"),
        ({"compare_every": -1}, "compare-every: -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings(**said)
    assert str(caught.value).startswith(named)


def test_they_are_read_back(tmp_path: Path) -> None:
    settings = Settings(steps=7, decay=Decay.LINEAR, betas=(0.8, 0.9), clip=None, data="stories")
    (tmp_path / "settings.json").write_text(json.dumps(settings.to_dict()))
    assert Settings.load(tmp_path / "settings.json") == settings


@pytest.mark.parametrize("content", ["[]", "{", '{"stepz": 3}', '{"steps": "many"}', '{"decay": "sudden"}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=r"settings\.json"):
        Settings.load(path)


def test_the_rate_rises_and_falls() -> None:
    settings = Settings(steps=20, learning_rate=1.0, warmup=4, final_rate=0.2)
    rates = [learning_rate(step, settings) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[11] == pytest.approx(0.6)  # half-way down: the mean of highest and last
    assert rates[19] == pytest.approx(0.2)


def test_other_decays() -> None:
    linear = Settings(steps=10, learning_rate=1.0, warmup=0, final_rate=0.0, decay=Decay.LINEAR)
    assert [learning_rate(step, linear) for step in (1, 5, 10)] == pytest.approx([0.9, 0.5, 0.0])
    constant = Settings(steps=10, learning_rate=0.5, warmup=0, decay=Decay.CONSTANT)
    assert {learning_rate(step, constant) for step in range(1, 11)} == {0.5}


def test_epochs_become_steps_when_batch_and_samples_are_known() -> None:
    assert Settings(epochs=2.0).with_steps(100, 8).steps == 25
    assert Settings(epochs=0.5).with_steps(100, 8).steps == 7
    assert Settings(epochs=1.0).with_steps(3, 8).steps == 1
    assert Settings(epochs=1.0).with_steps(3, 8).epochs is None, "a run that goes on has its steps"
    assert Settings(steps=9).with_steps(100, 8).steps == 9
    with pytest.raises(InvalidInput, match="epochs: 0 given; expected a number above 0"):
        Settings(epochs=0)
