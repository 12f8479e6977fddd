"""A run that is interrupted goes on as if it had not been: the same losses, each sample once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from browser import cut_off, needs_browser, opened_browser
from injecting import fail_at, stop_if_settled
from jobs import Job, plan_of, run_to_end
from longer import longer
from oracle import Case, first_weights, stock_loss, stock_model
from small_models import config

import galvatron
from galvatron.train.checkpoints.folder import complete
from galvatron.train.checkpoints.manifest import Manifest, SavedTensor
from galvatron.train.data.loader import Loader
from galvatron.train.data.opening import open_data
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings

_CASE = Case(config=config("bert"), stages=[["single"] * 4], batch=8, dtype=torch.float32)
_STEPS = 6
_SETTINGS = Settings(steps=_STEPS, warmup=1, learning_rate=1e-3, seed=3, weights=str(first_weights(_CASE)), clip=0.5)
_PLANS = {
    "mixed": plan_of(["dp4", "tp4", "dp2-tp2", "sdp4"]),
    "two ranks": plan_of(["dp2", "tp2", "sdp2", "dp2+zero2"]),
    "tensor parallel": plan_of(["tp2", "tp2", "tp2", "tp2"]),
    "sharded": plan_of(["sdp4", "sdp4", "dp4", "dp4+zero2"]),
    "pipeline": plan_of(["dp2", "tp2"], ["sdp2", "dp2"], micro_batches=2),
}


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of the stock model in this process, trained by PyTorch's own parts on the same samples."""
    model = stock_model(_CASE)
    matrices = [own for own in model.parameters() if own.ndim > 1]
    vectors = [own for own in model.parameters() if own.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
    )
    plan = plan_of(["single"] * 4)
    assert plan.model.config is not None
    data = open_data(None, plan.model.config, plan.model.training, seed=3)
    losses = []
    for step, batch in zip(range(_STEPS), Loader(data.train, batch=8, seed=3), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (
                0.1 + 0.9 * (1 + math.cos(math.pi * step / (_STEPS - 1))) / 2
            )  # after a warm-up of one step
        loss = stock_loss(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """Runs under each plan that nothing happened to, each of them made once."""

    @cache
    def run(name: str) -> Job:
        return run_to_end(tmp_path_factory.mktemp("whole"), _PLANS[name], _SETTINGS)

    return run


@pytest.mark.parametrize("name", ["two ranks", *(longer(name) for name in _PLANS if name != "two ranks")])
def test_any_plan_gives_the_same_curve(name: str, whole: Callable[[str], Job], alone: list[float]) -> None:
    assert whole(name).losses() == pytest.approx(alone, abs=1e-4)


@needs_browser
def test_the_page_of_a_run_has_its_losses_and_peaks(whole: Callable[[str], Job]) -> None:
    """A real run's report.html, opened without a network, dark and narrow."""
    job = whole("two ranks")
    report = json.loads((job.folder.path / "report.json").read_text())
    with opened_browser() as browser:
        page = browser.new_context(offline=True, color_scheme="dark", viewport={"width": 390, "height": 800}).new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((job.folder.path / "report.html").as_uri())
        page.wait_for_selector("#losses svg circle")
        drawn = page.eval_on_selector_all(
            "#losses svg circle", "dots => dots.map(dot => dot.getAttribute('aria-label'))"
        )
        widths = page.eval_on_selector_all(
            "#peaks svg rect[aria-label*='measured']", "bars => bars.map(bar => bar.getBoundingClientRect().width)"
        )
        predicted = page.eval_on_selector_all(
            "#peaks svg rect[aria-label*='predicted']", "bars => bars.map(bar => bar.getBoundingClientRect().width)"
        )
        assert cut_off(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert drawn == [f"step {line['step']}, training, {line['loss']}" for line in job.metrics()]
    (stage,) = report["stages"]
    memory = [stage[kind]["memory_bytes"] for kind in ("measured", "predicted")]
    assert widths[0] / predicted[0] == pytest.approx(memory[0] / memory[1], rel=0.02)
    assert problems == []


def _interrupted(path: Path, first: galvatron.Plan, then: galvatron.Plan, *, at: int) -> list[float]:
    """Stopped after a step and gone on under another plan."""
    job = Job(path, first, _SETTINGS, fail_at, 0, at - 1, stop_if_settled)
    assert job.wait() == [0] * job.world, job.logs()
    assert [line["step"] for line in job.metrics()] == [*range(1, at + 1)]
    return run_to_end(path, then, _SETTINGS).losses()


@pytest.mark.parametrize("name", ["two ranks", longer("mixed"), longer("pipeline")])
def test_two_halves_are_the_whole_bit_for_bit(tmp_path: Path, name: str, whole: Callable[[str], Job]) -> None:
    assert _interrupted(tmp_path, _PLANS[name], _PLANS[name], at=3) == whole(name).losses()
    assert _weights(tmp_path) == _weights(whole(name).folder.path)


def _weights(path: Path) -> dict[str, SavedTensor]:
    """What is in the last checkpoint: all tensors with the digests of their blocks."""
    saved = complete(RunFolder(path).checkpoints)[-1]
    assert saved.step == _STEPS
    return Manifest.read(saved.path).tensors


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("two ranks", "pipeline"),
        longer("sharded", "pipeline"),
        longer("tensor parallel", "sharded"),
        longer("pipeline", "tensor parallel"),
        longer("sharded", "mixed"),
    ],
)
def test_going_on_under_another_plan(tmp_path: Path, first: str, then: str, alone: list[float]) -> None:
    """With other numbers of processes too; what is read next is what one process would read."""
    assert _interrupted(tmp_path, _PLANS[first], _PLANS[then], at=3) == pytest.approx(alone, abs=1e-5)
