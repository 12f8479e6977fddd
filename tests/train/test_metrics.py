"""Metrics survive crashes and resumes: each step once, whatever was cut off."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from galvatron.train.metrics import MetricsFile, open_sinks, read_metrics
from galvatron.train.settings import Settings


def test_steps_after_the_checkpoint_are_dropped_and_come_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, after_step=0)
    for step in range(1, 6):
        first.write(step, {"loss": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # a crash
    again = MetricsFile(path, after_step=3)
    again.write(4, {"loss": 40.0})
    again.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = open_sinks(tmp_path, tmp_path / "metrics.jsonl", Settings(tensorboard=True), after_step=0)
    for step in (1, 2):
        for sink in sinks:
            sink.write(step, {"loss": 1.0 / step})
    for sink in sinks:
        sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the run is kept on disk."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sinks = open_sinks(tmp_path, tmp_path / "metrics.jsonl", Settings(wandb="galvatron-test"), after_step=0)
    for sink in sinks:
        sink.write(1, {"loss": 0.125})
        sink.close()
    kept = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) == 1
    end = time.monotonic() + 60  # a process of its own writes it
    while b"0.125" not in kept[0].read_bytes() and time.monotonic() < end:
        time.sleep(0.1)
    assert b"0.125" in kept[0].read_bytes()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.125}
