"""What people type in Python: values of other libraries, typos, None; and what is printed of a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.files.models import dump_model
from galvatron.core.files.profiles import dump_profile
from galvatron.core.spec import LayerTime, ModelProfile, Precision, Training
from galvatron.families import load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.setup import request_for, training_of

plan = cast("Any", galvatron.plan)


def test_numpy_s_numbers_are_numbers(tmp_path: Path) -> None:
    made = plan("bert-tiny", "cpu-4", batch=np.int64(8), max_micro_batches=np.int32(2), recompute=np.bool_(False))
    made.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == made
    assert made == plan("bert-tiny", "cpu-4", batch=8, max_micro_batches=2, recompute=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": 16.0}, "batch: 16.0 given; expected text or a whole number"),
        ({"batch": True}, "batch: True given"),
        ({"batch": "many"}, "batch: 'many' given; expected a whole number of samples, or best"),
        ({"max_batch": "8"}, "max-batch: '8' given; expected a whole number"),
        ({"recompute": "no"}, "recompute: 'no' given; expected True or False"),
        ({"recompute": 0}, "recompute: 0 given; expected True or False"),
        ({"space": None}, "space: None given; expected text"),
        ({"precision": 16}, "precision: 16 given; expected text"),
        ({"memory": [8]}, "memory: [8] given"),
        ({"recomput": True}, "'recomput' is not an option of a plan; did you mean 'recompute'?"),
        ({"batch_tokens": "4M", "batch": 8}, "batch-tokens and batch contradict"),
        ({"batch_tokens": "4X"}, "batch-tokens: '4X' is not a number"),
        ({"batch_tokens": 100}, "one sample of bert-tiny has 512 tokens"),
    ],
)
def test_what_an_option_cannot_be_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)):
        plan("bert-tiny", "cpu-4", **given)


@pytest.mark.parametrize(
    ("model", "cluster", "said"),
    [
        (None, "cpu-4", "model: None given"),
        (3, "cpu-4", "model: 3 given"),
        ("", "cpu-4", "model: '' given"),
        ("bert-tiny", None, "cluster: None given"),
    ],
)
def test_no_model_and_no_cluster_are_refused(model: Any, cluster: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        plan(model, cluster)


@pytest.mark.parametrize("micro_batches", [-1, 0, 2.0, True, None])
def test_a_plan_by_hand_has_a_number_of_micro_batches(micro_batches: Any) -> None:
    request = request_for("bert-tiny", "cpu-4", {"batch": 8})
    stages = [["dp4"] * len(request.model.layers)]
    assert priced(request, stages, micro_batches=2).micro_batches == 2
    with pytest.raises(InvalidInput, match="micro_batches"):
        priced(request, stages, micro_batches=micro_batches)


def test_a_plan_is_printed_in_one_line_and_names_are_found_by_tab() -> None:
    made = plan("bert-tiny", "cpu-4", batch=8)
    assert len(repr(made)) < 200
    assert "bert-tiny" in repr(made)
    assert "samples/s" in repr(made)
    assert set(galvatron.__all__) <= set(dir(galvatron))


@pytest.mark.parametrize(
    ("tokens", "batch"), [("4M", 7812), ("4Mi", 8192), (5000, 8), ("2k", 4), (512 * 12, 12), ("1100", 2)]
)
def test_a_batch_in_tokens_is_a_number_of_samples_that_divides_well(tokens: str | int, batch: int) -> None:
    """Samples of 512 tokens on 4 devices: 4e6 / 512 = 7812.5, and the nearest multiple of 4 is 7812."""
    request = request_for("bert-tiny", "cpu-4", {"batch_tokens": tokens})
    assert request.batch == batch


@pytest.mark.parametrize(
    ("model", "cluster", "most"), [("llama3-8b", "h100-8", 1 << 20), ("llama3-8b", "h100-64", 1 << 22)]
)
def test_batches_that_are_searched_have_tokens_as_people_use(model: str, cluster: str, most: int) -> None:
    batches = request_for(model, cluster, {}).batches
    assert batches[-1] * 8192 == most
    assert 8 <= len(batches) <= 16
    assert request_for(model, cluster, {"batch": "best"}).batches[-1] == 64 * (8 if cluster == "h100-8" else 64)


def test_every_device_has_a_sample_though_that_is_more_tokens() -> None:
    assert request_for("llama3-70b", "h100-1024", {}).batches[-1] == 1024
    assert request_for("vit-huge-32", "titan-rtx-8", {}).batches[-1] == 512, "images have no tokens to count"


def test_layers_that_were_described_compiled_are_not_planned_otherwise(tmp_path: Path) -> None:
    ways = (Training(precision=Precision.BF16, compile=each) for each in (False, True))
    plain, compiled = (load_model("llama-tiny", way) for way in ways)
    assert compiled.activation_bytes < plain.activation_bytes
    assert request_for(plain, "h100-8", {}).model.training.compile
    assert request_for(compiled, "cpu-4", {}).model.training.compile
    file = tmp_path / "traced.json"
    file.write_text(dump_model(compiled))
    for source in (compiled, file):
        with pytest.raises(InvalidInput, match="was described for compiled blocks"):
            request_for(source, "h100-8", {"compile": False})


def test_a_traced_models_profile_serves_other_versions_of_pytorch() -> None:
    """These differ in what a compiler keeps, which is counted for families and asked for of other models."""
    counted = load_model("llama-tiny", Training(precision=Precision.BF16, compile=True))
    traced = replace(counted, family="generic")
    for model, same in ((counted, False), (traced, True)):
        more = tuple(replace(own, split_activation_bytes=own.split_activation_bytes + 1) for own in model.layers)
        assert (replace(model, layers=more).layers_digest == model.layers_digest) is same
    dropped = replace(traced, training=replace(traced.training, dropout=False))
    assert dropped.layers_digest != traced.layers_digest


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    models = {name: load_model(name, training_of({})) for name in ("bert-base", "bert-large", "bert-huge-32")}
    assert models["bert-huge-32"].layers_digest == load_model("bert-huge-48", training_of({})).layers_digest
    profile = ModelProfile(
        name="measured",
        times=(LayerTime(layer="encoder", forward_s=1e-3),),
        layers_digest=models["bert-base"].layers_digest,
    )
    file = tmp_path / "profile.toml"
    file.write_text(dump_profile(profile))
    assert plan("bert-base", "cpu-4", batch=8, profile=file).profile == profile
    for model, setup in (("bert-large", {}), ("bert-base", {"sequence_length": 128}), ("bert-base", {"compile": True})):
        with pytest.raises(InvalidInput, match="was measured with other layers than those of"):
            plan(model, "cpu-4", batch=8, profile=file, **setup)
    file.write_text(dump_profile(replace(profile, layers_digest="")))
    plan("bert-large", "cpu-4", batch=8, profile=file)


def _set(content: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        content = content[int(name)] if name.isdigit() else content[name]  # type: ignore[index]
    content[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("certificate.gap", 1e308),
        ("certificate.gap", 0.5),
        ("certificate.combinations", -1),
        ("certificate.solved", -3),
        ("certificate.opened", 10**12),
        ("certificate.solved", 10**12),
        ("memory_budget_bytes", 2**60),
        ("profile.times.0.backward_ratio", -2.0),
        ("profile.memory.0.activation_bytes", -5),
        ("profile.memory.0.transient_bytes", -5),
    ],
)
def test_figures_that_no_plan_has_are_refused(
    measured_plan: Callable[[], dict[str, Any]], tmp_path: Path, path: str, value: Any
) -> None:
    content = measured_plan()
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    galvatron.Plan.load(file)
    _set(content, path, value)
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=path.split(".")[0]):
        galvatron.Plan.load(file)


@pytest.fixture(scope="module")
def measured_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    file = tmp_path_factory.mktemp("profile") / "profile.toml"
    file.write_text(
        'name = "measured"\n[[layers]]\nlayer = "encoder"\nforward = "1ms"\n'
        '[[memory]]\nlayer = "encoder"\nactivations = "1MiB"\ntransient = "1MiB"\n'
    )
    made = plan("bert-tiny", "cpu-4", batch=8, profile=file).to_json()
    return lambda: cast("dict[str, Any]", json.loads(made))


@pytest.mark.parametrize("given", [None, 3, ""])
def test_a_plan_s_file_is_a_path(given: Any) -> None:
    made = plan("bert-tiny", "cpu-4", batch=8)
    with pytest.raises(InvalidInput, match=re.escape(f"plan: {given!r} given as its file; expected a name")):
        made.save(given)
    if given != "":
        with pytest.raises(InvalidInput, match="expected a name such as"):
            galvatron.Plan.load(given)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (None, "stages: expected a list of stages"),
        ([None], "stages: expected a list of stages"),
        (["dp4"], "stages: expected a list of stages"),
        ([[None] * 4], "stages: None given for a layer; expected a strategy such as 'dp4'"),
    ],
)
def test_what_a_plan_by_hand_cannot_be_is_said(stages: Any, said: str) -> None:
    request = request_for("bert-tiny", "cpu-4", {"batch": 8})
    with pytest.raises(InvalidInput, match=re.escape(said)):
        priced(request, stages)


def test_numpy_s_numbers_of_micro_batches(tmp_path: Path) -> None:
    request = request_for("bert-tiny", "cpu-4", {"batch": 8})
    stages = [["dp4"] * len(request.model.layers)]
    priced(request, stages, micro_batches=cast("int", np.int64(2))).save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json").micro_batches == 2


def test_what_is_described_is_a_module_and_a_batch() -> None:
    describe = cast("Any", galvatron.describe)
    with pytest.raises(InvalidInput, match="model: 'bert-base' given; expected a torch"):
        describe("bert-base", None)


def test_public_names_alone_are_listed() -> None:
    assert dir(galvatron) == sorted([*galvatron.__all__, "__version__"])
