"""Plan files: round trip, and strict reading of broken, foreign and mutated ones."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import galvatron
from galvatron import InvalidInput, Plan, PlanMismatch
from galvatron.families import load_cluster
from galvatron.planner.plan.explain import request_of
from galvatron.planner.plan.record import FORMAT_VERSION


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with several stages, kinds of layer, strategies and a tensor-parallel axis."""
    return galvatron.plan("t5-tiny", "titan-rtx-8", memory="2GiB", batch=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def test_round_trip_is_byte_identical(plan: Plan, folder: Path) -> None:
    path = folder / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert loaded.to_json() == path.read_text(encoding="utf-8")


def test_embedded_facts_are_the_models_and_clusters_own(plan: Plan) -> None:
    """Digests are those of freshly loaded facts, so a plan can be matched with what it will run on."""
    from galvatron.families import load_cluster, load_model

    assert load_cluster("titan-rtx-8").digest == plan.cluster.digest
    assert load_model("t5-tiny", plan.model.training).digest == plan.model.digest


def test_the_configuration_is_the_models_own(plan: Plan, tmp_path: Path) -> None:
    """What builds the model is in the plan: of a preset its figures, of a config.json all of the file, of figures none;
    and it is part of what a plan says, but not of what it was made for."""
    assert plan.model.config is not None
    assert plan.model.config["architectures"] == ["T5ForConditionalGeneration"]
    content = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 24, "of_my_own": {"é": [1, 2.5, None]}}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    made = galvatron.plan(tmp_path, "titan-rtx-8", batch=8)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.model.config == content
    assert loaded.model.spec().config == content
    assert replace(loaded, model=replace(loaded.model, config=None)) != loaded
    assert replace(loaded.model.spec(), config=None) == loaded.model.spec()
    (tmp_path / "figures.toml").write_text(
        'name = "figures"\nlayers = [{ name = "block", parameters = 8, forward_flops = 9, activation_bytes = 16, '
        "boundary_bytes = 4 }]"
    )
    figures = galvatron.plan(tmp_path / "figures.toml", "titan-rtx-8", batch=8)
    figures.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").model.config is None


def _write(folder: Path, content: str | bytes) -> Path:
    path = folder / "broken.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _edited(plan: Plan, *path: str | int, value: Any) -> str:
    raw = json.loads(plan.to_json())
    at = raw
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("version",), 99, "version"),
        (("version",), True, "version"),
        (("batch",), "16", "batch"),
        (("micro_batches",), 5, "micro_batches"),
        (("schedule",), "zigzag", "schedule"),
        (("throughput",), 1e9, "throughput"),
        (("model", "digest"), "0" * 16, "model.digest"),
        (("cluster", "digest"), "0" * 16, "cluster.digest"),
        (("cluster", "facts", "levels", 0, "bytes_per_s"), 1.0, "cluster.digest"),
        (("cluster", "devices"), 4, "cluster.devices"),
        (("model", "kinds", 0, "parameters"), 5, "model.kinds[0]: layer 'embedding': replicated_parameters is 128"),
        (("model", "order", 0, "layer"), "nobody", "model.order[0].layer"),
        (("model", "kinds", 0, "tensor_parallel", "sequence_divides"), [2], "model.digest"),
        (("model", "order"), [], "model.order"),
        (("model", "config"), [], "model.config"),
        (("model", "config"), {}, "model.config.model_type: None"),
        (("model", "config", "model_type"), 5, "model.config.model_type: 5"),
        (("stages", 0, "devices"), [1], "stages[0].devices"),
        (("stages", 0, "layers", 0, "strategy"), "dp3", "stages[0].layers[0].strategy"),
        (("stages", 0, "layers", 0, "strategy"), "warp9", "stages[0].layers[0].strategy"),
        (("stages", 0, "layers", 0, "layer"), "head", "stages[0].layers[0]"),
        (("stages", 0, "layers"), [], "stages[0].layers"),
        (("stages", 0, "in_flight"), 77, "stages[0].in_flight"),
        (("stages", 0, "memory_bytes"), 1 << 60, "stages[0].memory_bytes"),
        (("stages",), [], "stages"),
        (("surprise",), 1, "surprise"),
        (("stages", 0, "layers", 0, "note"), "hi", "stages[0].layers[0].note"),
        (("certificate", "gap"), None, "certificate.gap"),
        (("certificate", "gap"), -0.5, "certificate"),
        (("certificate", "lower_bound_s"), 1e9, "certificate"),
        (("bubble_s",), -5.0, "bubble_s"),
        (("bubble_s",), 5.0, "bubble_s: 5.0 is not iteration_s less the micro-batches of the slowest stage"),
        (("stages", 0, "time_s"), 1e6, "bubble_s"),
        (("stages", 0, "time_s"), 1e-12, "bubble_s"),
        (("stages", 0, "time", "sync_s"), 1e6, "stages[0].time.sync_s: 1000000.0 is more than the iteration has"),
        (("stages", 0, "time", "compute_s"), 1e3, "stages[0].time.compute_s"),
        (("stages", 0, "time", "compute_s"), -7.0, "bubble_s or stages[].time"),
        (("stages", 0, "memory", "states"), -7, "stages[0].memory_bytes"),
        (("stages", 0, "memory_bytes"), 1, "stages[0].memory_bytes"),
        (("model", "parameters"), 3, "model.parameters"),
        (("space", "cuts"), "foo", "space.cuts"),
        (("space", "conventions"), "foo", "space.conventions"),
        (("space", "name"), "foo", "space 'foo'"),
        (("space", "batches"), [], "space.batches"),
        (("space", "batches"), [8], "space.batches"),
        (("space", "max_micro_batches"), 0, "space.max_micro_batches"),
    ],
)
def test_wrong_fields_are_named(plan: Plan, folder: Path, path: tuple[str | int, ...], value: Any, field: str) -> None:
    broken = _write(folder, _edited(plan, *path, value=value))
    with pytest.raises(InvalidInput) as caught:
        Plan.load(broken)
    assert f"broken.json: {field}" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("forward_s", 0), ("forward_s", 1e9), ("forward_fixed_s", -1), ("backward_least_s", -1e-9), ("recompute_s", 1e7)],
)
def test_times_of_a_profile_are_seconds(folder: Path, field: str, value: float) -> None:
    measured = galvatron.plan("bert-huge-32", "titan-rtx-8", memory="8GiB", batch=8, profile="titan-rtx-bert-huge")
    broken = _write(folder, _edited(measured, "profile", "times", 0, field, value=value))
    with pytest.raises(
        InvalidInput, match=rf"broken\.json: profile\.times\[0\].*{field}(:| is) \S+ ?(given)?; expected"
    ):
        Plan.load(broken)


def test_sequences_that_cannot_be_divided_are_refused(folder: Path) -> None:
    """In 8 devices without a pipeline: an embedding has none, and 100 tokens are not eight equal parts."""
    plan = galvatron.plan("gpt2-medium", "titan-rtx-8", batch=8, space="tp", sequence_length=100)
    assert [stage.layers[0].layer for stage in plan.stages] == ["embedding"]
    for layer, having in ((0, "'embedding' has nothing to divide"), (1, "'decoder' has sequences of 100")):
        broken = _write(folder, _edited(plan, "stages", 0, "layers", layer, "strategy", value="tp8+sp"))
        with pytest.raises(InvalidInput, match=rf"broken\.json: stages\[0\]\.layers\[{layer}\]\.strategy: .*{having}"):
            Plan.load(broken)
    good = _write(folder, _edited(plan, "stages", 0, "layers", 1, "strategy", value="tp8+rc"))
    assert Plan.load(good).stages[0].strategies[1].recompute


def test_the_docs_name_this_version() -> None:
    text = (Path(__file__).parents[3] / "docs" / "plan-format.md").read_text(encoding="utf-8")
    assert f"One JSON file, version {FORMAT_VERSION}," in text
    assert f"| `version` | {FORMAT_VERSION};" in text


def test_other_versions_and_digests_are_mismatches(plan: Plan, folder: Path) -> None:
    for path, value in ((("version",), 1), (("version",), 2), (("model", "digest"), "x"), (("cluster", "digest"), "x")):
        with pytest.raises(PlanMismatch):
            Plan.load(_write(folder, _edited(plan, *path, value=value)))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": NaN}', b"[" * 100_000, b'{"version": 1}', b"PK\x03\x04"],
)
def test_foreign_files_are_said_to_be_none(folder: Path, content: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"broken\.json"):
        Plan.load(_write(folder, content))


def test_missing_file_and_folder(folder: Path) -> None:
    for path, reason in ((folder / "nothing.json", "no such file"), (folder, "cannot be read")):
        with pytest.raises(InvalidInput, match=f"{path}: {reason}.*; expected a plan in JSON"):
            Plan.load(path)


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of everything in a plan that can be dropped or replaced."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += _leaves(child, (*path, key))
    return found


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.just({"a": [1]}),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_plans_never_pass_silently(plan: Plan, folder: Path, data: st.DataObject) -> None:
    """Drop, replace or add anything: either the error names the file, or what was read says just what the file says and
    can be explained."""
    raw = json.loads(plan.to_json())
    original = copy.deepcopy(raw)
    path = data.draw(st.sampled_from(_leaves(raw)))
    at = raw
    for part in path[:-1]:
        at = at[part]
    action = data.draw(st.sampled_from(["drop", "replace", "add", "truncate"]))
    if action == "drop":
        del at[path[-1]]
    elif action == "replace":
        at[path[-1]] = data.draw(_JUNK)
    elif isinstance(at, dict):
        at[data.draw(st.text(min_size=1, max_size=6).filter(lambda key: key not in at))] = data.draw(_JUNK)
    text = json.dumps(raw)
    if action == "truncate":
        text = text[: data.draw(st.integers(0, len(text) - 1))]
    loaded = _read(_write(folder, text))
    assert loaded is None or json.loads(loaded.to_json()) == raw or raw == original
    if loaded is not None:
        request_of(loaded)


def _read(path: Path) -> Plan | None:
    """The plan, or None where it is refused by name; any other exception breaks the test."""
    try:
        return Plan.load(path)
    except InvalidInput as error:
        if path.name not in str(error):
            raise
        return None


def test_stages_that_share_processors_may_take_longer_than_the_iteration(tmp_path: Path) -> None:
    """Each at the speed that it has while the others take turns with it."""
    cluster = replace(load_cluster("cpu-4"), compute_contention=2.0)
    made = galvatron.plan("bert-tiny", cluster, batch=8, space="dp+pp", pipeline=2)
    assert made.micro_batches * max(stage.time_s for stage in made.stages) > made.iteration_s
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
