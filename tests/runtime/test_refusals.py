"""What does not go together is refused, before anything is allocated, with the place and the way out in the message."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Case, batches, first_weights
from parity import plan_for
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron
from galvatron.core.errors import GalvatronError, InvalidInput, PlanMismatch
from galvatron.runtime import build

_CASE = Case(config=config("bert"), stages=[["dp2", "tp2", "sdp2", "dp2"]], batch=4, micro_batches=2, steps=1)


def _parallelize(plan: galvatron.Plan, model: Mapping[str, Any] | None, folder: Path | None) -> tuple[str, str]:
    """On a rank: the error's class and message."""
    try:
        galvatron.parallelize(model, plan, weights=folder, device="cpu")
    except GalvatronError as error:
        return type(error).__name__, str(error)
    return "", ""


def _refused(
    plan: galvatron.Plan, model: Mapping[str, Any] | None = None, folder: Path | None = None, world: int = 2
) -> tuple[str, str]:
    """The error of all ranks, the same on each."""
    found = ranks(world).run(_parallelize, plan, model, folder)
    assert all(one == found[0] for one in found)
    kind, message = found[0]
    assert kind, "nothing was refused"
    return kind, message


def test_the_plan_itself_is_taken() -> None:
    """Else the refusals below would prove nothing."""
    assert ranks(2).run(_parallelize, plan_for(_CASE), None, None) == [("", "")] * 2


@pytest.mark.parametrize("world", [1, 4])
def test_world_size(world: int) -> None:
    kind, message = _refused(plan_for(_CASE), world=world)
    assert kind == PlanMismatch.__name__
    assert f"world size: {world} processes are running, but the plan is for 2 devices" in message
    assert "start 2 processes" in message


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (config("bert", num_hidden_layers=3), "layer 3 is 'encoder', the plan says 'head'"),
        (config("gpt2"), "layer 1 is 'decoder', the plan says 'encoder'"),
        (config("bert", num_hidden_layers=1), "it has 3 layers"),
        (config("bert", intermediate_size=128), "'encoder' has 12,704 parameters"),
        (config("bert", vocab_size=68), "'embedding' has 2,816 parameters"),
    ],
)
def test_a_plan_of_another_model(model: dict[str, Any], expected: str) -> None:
    kind, message = _refused(plan_for(_CASE), model)
    assert kind == PlanMismatch.__name__
    assert message.startswith("model: ")
    assert expected in message
    assert "plan again" in message


def _train(plan: galvatron.Plan, batch: dict[str, Tensor]) -> float | str:
    """On a rank: the loss, or why there is none."""
    try:
        return float(galvatron.parallelize(None, plan, device="cpu").forward_backward(batch))
    except InvalidInput as error:
        return str(error)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_masks_of_each_head(family: str) -> None:
    """One that is the same for all heads trains; where TP divides heads it is refused."""
    case = replace(_CASE, config=config(family), micro_batches=1, stages=[["dp2"] * 4])
    batch = dict(batches(case)[0])
    rows, length = batch["input_ids"].shape
    for heads in (1, 8):
        mask = torch.ones(rows, heads, length, length, dtype=torch.bool).tril()
        one, two = (
            ranks(2).run(_train, plan_for(replace(case, stages=[[strategy] * 4])), {**batch, "attention_mask": mask})
            for strategy in ("dp2", "tp2")
        )
        if heads == 1:
            assert one == pytest.approx(two)
        else:
            assert all(isinstance(loss, float) for loss in one)
            assert all("'attention_mask' has a mask for each of 8 heads, which 'tp2' of layer" in why for why in two)


def test_masks_of_pixels_are_none_of_heads() -> None:
    """An image processor gives one for each image of a sample."""
    build._check_masks({"pixel_attention_mask": (2, 16, 16), "attention_mask": (1, 8, 8)}, "tp2")
    with pytest.raises(InvalidInput, match="each of 2 heads"):
        build._check_masks({"decoder_attention_mask": (2, 8, 8)}, "tp2")


def test_batches_that_want_gradients() -> None:
    """Of a part on each rank they would be, and of copies not the user's own."""
    batch = dict(batches(Case(config=config("vit"), stages=[["dp2"] * 4], batch=4))[0])
    name = next(name for name, own in batch.items() if own.is_floating_point())
    batch[name].requires_grad_()
    found = ranks(2).run(_train, plan_for(Case(config=config("vit"), stages=[["dp2"] * 4], batch=4)), batch)
    assert all(f"{name!r} requires a gradient" in str(why) for why in found)


def test_arguments_of_another_kind() -> None:
    given: Any = None
    with pytest.raises(InvalidInput, match=r"plan: a NoneType given; expected a plan of galvatron\.plan or Plan\.load"):
        galvatron.parallelize(None, given)
    with pytest.raises(InvalidInput, match="folder: None given; expected the one of the checkpoints"):
        galvatron.Checkpoints(given)


def test_heads_that_do_not_divide() -> None:
    """In a plan that somebody edited: the planner makes none."""
    case = replace(_CASE, config=config("bert", num_attention_heads=1), stages=[["dp2"] * 4])
    plan = plan_for(case)
    (stage,) = plan.stages
    layers = tuple(replace(layer, strategy="tp2") for layer in stage.layers)
    kind, message = _refused(replace(plan, stages=(replace(stage, layers=layers),)))
    assert kind == InvalidInput.__name__
    assert "layers[1].strategy (encoder): 'tp2' splits it 2 ways, which must divide 1" in message
    with pytest.raises(InvalidInput, match=r"layer 1 \(encoder\): strategy 'tp2' cannot run it"):
        plan_for(replace(case, stages=[["dp2", "tp2", "dp2", "dp2"]]))


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    plan = plan_for(_CASE)
    kind, message = _refused(plan, folder=tmp_path / "nowhere")
    assert (kind, "no such folder" in message) == (InvalidInput.__name__, True)
    kind, message = _refused(plan, folder=tmp_path)
    assert kind == InvalidInput.__name__
    assert "has neither model.safetensors nor" in message
    fewer = first_weights(replace(_CASE, config=config("bert", num_hidden_layers=1)))
    kind, message = _refused(plan, folder=fewer)
    assert kind == InvalidInput.__name__
    assert "bert.encoder.layer.1" in message
    wider = first_weights(replace(_CASE, config=config("bert", intermediate_size=128)))
    kind, message = _refused(plan, folder=wider)
    assert kind == InvalidInput.__name__
    assert "has shape [128, 32]; expected [64, 32]" in message


def test_a_model_of_figures_alone() -> None:
    plan = plan_for(_CASE)
    kind, message = _refused(replace(plan, model=replace(plan.model, config=None)))
    assert kind == InvalidInput.__name__
    assert "model.config is null" in message


def test_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidInput, match="no process group: start the program with torchrun"):
        galvatron.parallelize(None, plan_for(_CASE), device="cpu")


def test_half_of_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match="RANK is set to 0, but MASTER_ADDR and MASTER_PORT not; start"):
        galvatron.parallelize(None, plan_for(_CASE), device="cpu")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "x"}, "RANK: 'x' is set; expected a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE: '-1' is set; expected a whole number"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT: 'abc' is set; expected a whole number up to 65535"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: '99999' is set"),
        ({"RANK": "3"}, "RANK: 3 is set, but WORLD_SIZE is 2; expected a rank below it"),
    ],
)
def test_numbers_by_which_no_ranks_can_meet(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], said: str) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**usual, **wrong}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput) as refused:
        galvatron.parallelize(None, plan_for(_CASE), device="cpu")
    assert said in str(refused.value)


_ALONE = """
import galvatron
galvatron.parallelize(None, galvatron.Plan.load({plan!r}), device="cpu")
"""


@pytest.mark.slow
def test_a_script_that_is_started_wrongly_ends_in_one_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan_for(_CASE).save(plan)
    done = subprocess.run(
        [sys.executable, "-c", _ALONE.format(plan=str(plan))],
        capture_output=True, text=True, timeout=180, check=False,
        env={**{key: value for key, value in os.environ.items() if "RANK" not in key}, "RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: RANK is set to 0, but" in done.stderr


def _feed(plan: galvatron.Plan, given: list[dict[str, Any]]) -> list[str]:
    """On a rank: what training and evaluation say to each of these batches; the model goes on after each."""
    model = galvatron.parallelize(None, plan, device="cpu")
    said = []
    for batch in given:
        for call in (model.forward_backward, model.evaluate):
            try:
                call(batch)
            except InvalidInput as error:
                said.append(str(error))
            else:
                said.append("")
    return said


def test_batches_that_do_not_fit() -> None:
    (batch,) = batches(_CASE)
    short = {name: rows[:3] for name, rows in batch.items()}
    uneven = {**batch, "labels": batch["labels"][:2]}
    unlabelled = {name: rows for name, rows in batch.items() if name != "labels"}
    number: dict[str, Tensor | int] = {**batch, "length": 8}
    given = [short, uneven, unlabelled, number, batch]
    for said in ranks(2).run(_feed, plan_for(_CASE), given):
        expected = [
            "batch: 'input_ids' has 3 rows; the plan trains batches of 4 samples (2 micro-batches of 2)",
            "batch: 'labels' has 2 rows; the plan trains batches of 4 samples",
            "batch: labels missing; it has input_ids",
            "batch: length given, which no layer reads, so that it would be ignored",
            "",
        ]
        for place, text in enumerate(expected):
            for message in said[2 * place : 2 * place + 2]:
                assert message.startswith(text)
                assert bool(message) == bool(text)


def test_batches_without_inputs() -> None:
    """Which the embedding needs, whatever stage a rank is in: nobody may wait for the others."""
    case = replace(_CASE, stages=[["single", "single"], ["single", "single"]])
    (batch,) = batches(case)
    labels = {"labels": batch["labels"]}
    for said in ranks(2).run(_feed, plan_for(case), [labels, batch]):
        assert all("input_ids" in message for message in said[:2])
        assert said[2:] == ["", ""]


_SPLIT = Case(config=config("gpt2"), stages=[["tp2"] * 4], batch=4, steps=1)
_FUSED = replace(_SPLIT, stages=[["dp2", "dp2", "dp2", "dp2+fl"]])


@pytest.mark.parametrize("case", [_SPLIT, _FUSED])
def test_numbers_out_of_range(case: Case) -> None:
    """Which a whole table refuses; 67 words."""
    (batch,) = batches(case)

    def changed(name: str, value: int) -> dict[str, Tensor]:
        return {**batch, name: torch.where(torch.arange(8) == 3, value, batch[name])}

    given = [changed("labels", -1), changed("labels", 67), changed("labels", -100), batch]
    refused = ["batch: a label has -1; expected 0 to 66, or -100", "batch: a label has 67", "", ""]
    if case is _SPLIT:
        given = [changed("input_ids", 67), changed("input_ids", -1), *given]
        refused = ["batch: a token has 67; expected 0 to 66", "batch: a token has -1", *refused]
    for said in ranks(2).run(_feed, plan_for(case), given):
        for sentence, start in zip(said, [each for each in refused for _ in range(2)], strict=True):
            assert sentence.startswith(start)
            assert bool(sentence) == bool(start)


def test_inputs_that_nobody_reads() -> None:
    """The stock model would compute something else with them."""
    (batch,) = batches(_SPLIT)
    vectors = torch.zeros(4, 8, 32)
    shorter = {**batch, "labels": batch["labels"][:, 1:]}
    given = [{**batch, "inputs_embeds": vectors}, {**batch, "shift_labels": batch["labels"]}, batch, shorter]
    for said in ranks(2).run(_feed, plan_for(_SPLIT), given):
        assert said[6].startswith("batch: labels have shape [4, 7], input_ids [4, 8]; expected a label for each token")
        assert said[0].startswith("batch: inputs_embeds given, which no layer reads")
        assert said[2].startswith("batch: shift_labels given, which no layer reads")
        assert said[4] == said[5] == ""


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_the_longest_position_of_a_batch(kind: str) -> None:
    """Which a rank with some of its rows does not know. Up to eight positions nothing changes."""
    rotation: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 2, "long_factor": [3.0] * 2}
        rotation |= {**factors, "original_max_position_embeddings": 8}
    content = config("llama", rope_parameters=rotation, max_position_embeddings=8 if kind == "dynamic" else 64)
    case = Case(config=content, stages=[["dp2"] * 4], batch=4, steps=1, dtype=torch.float64)
    ids = torch.arange(4 * 16).view(4, 16) % 60

    def given(*first: int) -> dict[str, Tensor]:
        rows = [torch.cat([torch.arange(one), torch.arange(16 - one)]) for one in first]
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.stack(rows)}

    uneven, short, alike = given(16, 8, 8, 8), given(8, 8, 8, 8), given(12, 12, 12, 12)
    for said in ranks(2).run(_feed, plan_for(case), [uneven, short, alike]):
        assert said[0].startswith(
            "batch: the last positions of its rows are 7 to 15; above 7 the model rotates all rows"
        )
        assert said[2:] == ["", "", "", ""]


def test_labels_that_are_no_classes() -> None:
    """The stock model would take them for another kind of loss."""
    case = Case(config=config("vit"), stages=[["dp2"] * 4], batch=4, steps=1)
    (batch,) = batches(case)
    for said in ranks(2).run(_feed, plan_for(case), [{**batch, "labels": torch.rand(4, 10)}]):
        assert said[0].startswith("batch: labels are torch.float32 of shape [4, 10]; expected numbers of classes")


def test_sequences_that_a_later_stage_cannot_divide() -> None:
    """Found by every rank before any message is sent: one of another length would end the process."""
    stages = [["tp2", "tp2"], ["tp2+sp", "tp2"]]
    case = Case(config=config("gpt2"), stages=stages, batch=4, micro_batches=2, steps=1)
    (batch,) = batches(case)
    odd = {name: rows[:, :7] for name, rows in batch.items()}
    for said in ranks(4).run(_feed, plan_for(case), [odd, batch]):
        assert said[0] == said[1]
        assert said[0].startswith("batch: sequences of 7 tokens cannot be divided over 2 ranks, as 'tp2+sp' of layer 2")
        assert said[2:] == ["", ""]
