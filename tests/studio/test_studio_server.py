"""The studio's answers are the planner's, and it refuses other origins, large requests, paths, and what is no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Studio, asked, served_studio

import galvatron
from galvatron.core.files.clusters import dump_cluster
from galvatron.families import load_cluster
from galvatron.planner.exchange.export import TARGETS, export_plan
from galvatron.planner.exchange.views import export_file, export_lines
from galvatron.studio.guard import MOST_BYTES
from galvatron.studio.reply import DOWNLOADS
from galvatron.studio.serve import serve

CONFIG = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
          "num_attention_heads": 8, "vocab_size": 32000}  # fmt: skip


@pytest.fixture(scope="module")
def studio() -> Iterator[Studio]:
    with served_studio() as running:
        yield running


def _upload(file: str, content: Any) -> dict[str, str]:
    return {"file": file, "text": content if isinstance(content, str) else json.dumps(content)}


def _error(done: tuple[int, bytes]) -> str:
    said: str = json.loads(done[1])["error"]
    return said


def test_the_answer_is_the_planners(studio: Studio) -> None:
    said = studio.plan("bert-large", "titan-rtx-8", batch=64, memory="8GiB", recompute=False)
    plan = galvatron.plan("bert-large", "titan-rtx-8", batch=64, memory="8GiB", recompute=False)
    assert said["fits"] is True
    assert said["figures"]["throughput"] == plan.throughput
    assert [part["value"] for part in said["facts"]["memory"]["parts"]] == [
        value
        for stage in plan.stages
        for value in (stage.memory.states, stage.memory.activations, stage.memory.transient, stage.memory.reserved)
    ]
    assert said["device_memory_bytes"] == 24 * 2**30


def test_what_does_not_fit_says_what_would(studio: Studio) -> None:
    """The budget that it names fits, a little less does not, and what it advises does fit."""
    question = {"batch": 32, "memory": "1.45GiB", "recompute": False}
    said = studio.plan("bert-base", "titan-rtx-8", **question)
    assert said["fits"] is False
    needed = int(said["problem"].partition("(")[2].partition(" bytes")[0])
    assert studio.plan("bert-base", "titan-rtx-8", **{**question, "memory": needed})["fits"] is True
    assert studio.plan("bert-base", "titan-rtx-8", **{**question, "memory": needed - 2**20})["fits"] is False
    status, body = studio.post("/advice", asked("bert-base", "titan-rtx-8", **question))
    lines = json.loads(body)["advice"]
    assert status == 200
    assert any(line.endswith("(--recompute)") for line in lines)
    assert studio.plan("bert-base", "titan-rtx-8", **{**question, "recompute": True})["fits"] is True


def test_what_ifs_are_questions_with_the_planners_answers(studio: Studio) -> None:
    said = studio.plan("bert-large", "rtx4090", devices=4, batch=32)
    by_label = {each["label"]: each["question"] for each in said["what_ifs"]}
    priced = {label: json.loads(studio.post("/price", asked)[1]) for label, asked in by_label.items()}
    assert priced["8 devices instead of 4"]["figures"]["devices"] == 8
    twice = galvatron.plan("bert-large", "rtx4090", devices=8, batch=32)
    assert priced["8 devices instead of 4"]["figures"]["throughput"] == twice.throughput
    assert priced["2 devices instead of 4"]["figures"]["devices"] == 2
    more, less = (label for label in by_label if " GiB instead of " in label)
    assert by_label[more]["setup"]["memory"] == 3 * by_label[less]["setup"]["memory"]
    speeds = [priced[label]["figures"]["throughput"] for label in (less, more)]
    assert speeds[0] <= said["figures"]["throughput"] <= speeds[1], "more memory is never slower"
    assert priced["batch 64 instead of 32"]["figures"]["batch"] == 64


def test_prices_are_those_of_the_command_line(studio: Studio) -> None:
    question = {**asked("llama3-8b", "h100", batch=128), "tokens": 1e12, "price": 2.5}
    answer = json.loads(studio.post("/price", question)[1])["figures"]["answer"]
    plan = galvatron.plan("llama3-8b", "h100", batch=128)
    hours = 1e12 / (plan.throughput * 8192) / 3600
    assert answer["days"] == pytest.approx(hours / 24)
    assert answer["cost"] == pytest.approx(hours * 8 * 2.5)


@pytest.mark.slow
def test_what_is_downloaded_is_what_the_command_line_writes(studio: Studio) -> None:
    question = asked("bert-tiny", "titan-rtx-8", batch=32)

    def taken(file: str) -> dict[str, Any]:
        status, body = studio.post(f"/download/{file}", question)
        assert status == 200, body
        said: dict[str, Any] = json.loads(body)
        return said

    plan = galvatron.plan("bert-tiny", "titan-rtx-8", batch=32)
    assert taken("plan.json") == {"text": plan.to_json(), "said": []}
    assert json.loads(taken("plan.trace.json")["text"])["traceEvents"]
    assert taken("cluster.toml")["text"] == dump_cluster(load_cluster("titan-rtx-8"))
    for target in TARGETS:
        done = taken(f"{target.name}{target.suffix}")
        export = export_plan(plan, target)
        assert done == {"text": export_file(export), "said": list(export_lines(export))}
    assert {each.file for each in DOWNLOADS} == {each["file"] for each in json.loads(_known(studio))["downloads"]}


def _known(studio: Studio) -> bytes:
    return studio.send("GET", "/known", b"", {})[1]


def test_uploaded_models_and_clusters_are_planned_for(studio: Studio, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    cluster = dump_cluster(load_cluster("titan-rtx-8")).replace('memory = "24GiB"', 'memory = "12GiB"')
    (tmp_path / "mine.toml").write_text(cluster)
    said = studio.plan(
        _upload("config.json", {**CONFIG, "_name_or_path": "/somewhere/else"}), _upload("mine.toml", cluster)
    )
    plan = galvatron.plan(tmp_path, tmp_path / "mine.toml")
    assert said["figures"]["throughput"] == plan.throughput
    assert said["device_memory_bytes"] == 12 * 2**30
    own = (
        'name = "own"\n[[layers]]\nname = "block"\ncount = 4\nparameters = 1000\nforward_flops = 1e6\n'
        "activation_bytes = 64\nboundary_bytes = 8"
    )
    assert studio.plan(_upload("own.toml", own), "titan-rtx-8", batch=8)["fits"] is True


@pytest.mark.parametrize(
    ("model", "cluster", "said"),
    [
        (_upload("config.json", "{"), "h100", "is not JSON"),
        (_upload("config.json", "[1]"), "h100", "expected an object with a field model_type"),
        (_upload("config.json", {"hidden_size": 8}), "h100", "model_type"),
        pytest.param(
            _upload("config.json", {"model_type": "no-such-thing"}), "h100", "no-such-thing", marks=pytest.mark.slow
        ),  # transformers is asked
        (_upload("config.json", {**CONFIG, "num_attention_heads": 7}), "h100", "a divisor"),
        (_upload("config.json", {**CONFIG, "backbone": "../secret"}), "h100", "could be a path"),
        (_upload("config.json", {**CONFIG, "quantization_config": {"at": "~/key"}}), "h100", "could be a path"),
        (_upload("model.toml", dump_cluster(load_cluster("titan-rtx-8"))), "h100", "layers is missing"),
        (_upload("model.toml", "name = "), "h100", "is not TOML"),
        (_upload("model.bin", "x"), "h100", ".json or .toml"),
        (_upload("../config.json", CONFIG), "h100", "without folders"),
        ("bert-tiny", _upload("cluster.toml", 'name = "mine"'), "device is missing"),
        ("bert-tiny", _upload("cluster.json", CONFIG), ".toml"),
        ("bert-tiny", _upload("cluster.toml", json.dumps(CONFIG)), "is not TOML"),
        ("no-such-model", "h100", "is no preset"),
        ("bert-tiny", "no-such-cluster", "is no preset"),
        ({"name": "bert-tiny", "text": "x", "file": "x.json"}, "h100", "the name of a preset, or"),
        ({}, "h100", "the name of a preset, or"),
    ],
)
def test_what_is_no_model_and_no_cluster_is_refused(studio: Studio, model: Any, cluster: Any, said: str) -> None:
    done = studio.post("/plan", asked(model, cluster))
    assert done[0] == 400
    assert said in _error(done)


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"profile": "titan-rtx-bert-huge.toml"}, "setup.profile cannot be asked here"),
        ({"batch": -1}, "batch"),
        ({"memory": "8 apples"}, "memory"),
        ({"devices": "8"}, "devices"),
        ({"devices": 12}, "12 devices of h100"),
        ({"recompute": "yes"}, "recompute"),
    ],
)
def test_a_setup_is_checked(studio: Studio, setup: dict[str, Any], said: str) -> None:
    done = studio.post("/plan", asked("bert-tiny", "h100", **setup))
    assert done[0] == 400
    assert said in _error(done)


_OPENED: list[str] | None = None


def _noting(event: str, arguments: tuple[Any, ...]) -> None:
    if _OPENED is not None and event in ("open", "os.listdir", "os.scandir"):
        _OPENED.append(str(arguments[0]))


def test_paths_that_a_page_names_are_never_opened(studio: Studio, tmp_path: Path) -> None:
    """Files that are a right model and a right cluster: named as paths they are refused, and nobody opens them."""
    global _OPENED
    sys.addaudithook(_noting)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "cluster.toml").write_text(dump_cluster(load_cluster("titan-rtx-8")))
    _OPENED = []
    try:
        for model in (str(folder), str(folder / "config.json"), f"./{os.path.relpath(folder)}"):
            assert studio.post("/plan", asked(model, "h100"))[0] == 400
        assert studio.post("/plan", asked("bert-tiny", str(tmp_path / "cluster.toml")))[0] == 400
        assert studio.send("GET", f"/{'../' * 8}{folder}/config.json", b"", {})[0] == 404
        assert studio.send("GET", "/studio.html", b"", {})[0] == 404, "only what is listed is served"
        opened = [path for path in _OPENED if str(tmp_path) in path]
    finally:
        _OPENED = None
    assert not opened


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "http://127.0.0.1:{port}.evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Origin": "http://localhost:{port}", "Host": "localhost:{port}"}, 200),
    ],
)
def test_only_its_own_page_may_ask(studio: Studio, headers: dict[str, str], status: int) -> None:
    own = {name: value.format(port=studio.port) for name, value in headers.items()}
    done = studio.post("/price", asked("bert-tiny", "titan-rtx-8", batch=8), **own)
    assert done[0] == status, done[1]


def test_a_page_of_another_name_is_not_served(studio: Studio) -> None:
    assert studio.send("GET", "/", b"", {"Host": "evil.example"})[0] == 403
    assert studio.send("GET", "/", b"", {})[0] == 200
    assert studio.send("PUT", "/plan", b"", {"Origin": "http://evil.example"})[0] == 403


def test_large_requests_are_refused(studio: Studio) -> None:
    """By their length before anything is read, and in pieces once it is too much."""
    body = b" " * (MOST_BYTES + 1)
    done = studio.post("/plan", body)
    assert done[0] == 413
    assert f"expected at most {MOST_BYTES}" in _error(done)
    headers = {"Origin": studio.address, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    pieces = (b" " * 2**16 for _ in range(17))
    status, said = studio.send("POST", "/plan", pieces, headers)
    assert status == 413, said
    assert studio.post("/plan", b" " * MOST_BYTES)[0] == 400, "that much is read, and is no question"
    assert studio.post("/plan", b"\xff")[0] == 400


def test_the_command_serves_this_machine_alone(tmp_path: Path) -> None:
    """It says its address, no other interface has the port, and an interrupt ends it."""
    pytest.importorskip("uvicorn", reason="no server: pip install galvatron[studio]")
    command = [sys.executable, "-m", "galvatron", "studio"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().split()[0].rsplit(":", 1)[1].strip("/"))
            assert Studio(port).plan("bert-tiny", "titan-rtx-8", batch=8)["fits"] is True
            for family, other in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
                with socket.socket(family) as trying:
                    assert trying.connect_ex((other, port)) != 0
            process.send_signal(signal.SIGINT)
            assert process.wait(20) in (0, 130, -signal.SIGINT)
            assert "Traceback" not in (process.stderr.read() if process.stderr else "")
        finally:
            process.kill()


def test_a_port_that_is_taken_is_named() -> None:
    pytest.importorskip("uvicorn", reason="no server: pip install galvatron[studio]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(galvatron.InvalidInput, match=f"port: {port} cannot be used"):
            serve(port, lambda _: None)
    with pytest.raises(galvatron.InvalidInput, match="port: 70000 cannot be used"):
        serve(70000, lambda _: None)
