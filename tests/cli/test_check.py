"""``galvatron check`` end to end, on real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import galvatron
from galvatron import cli
from galvatron.core.errors import Unequal
from galvatron.train import check as checking
from galvatron.train.check import Verdict

_QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "tie_word_embeddings": True,
}


def _run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    monkeypatch.setattr(sys, "argv", ["galvatron", "check", *arguments])
    status = 0
    try:
        cli.main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return status, captured.out, captured.err


def _folder(path: Path, **changed: Any) -> str:
    (path / "config.json").write_text(json.dumps({**_QWEN, **changed}))
    return str(path)


@pytest.mark.slow
def test_an_unknown_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = _run(monkeypatch, capsys, _folder(tmp_path), "--devices", "2", "--json")
    assert status == 0, err
    found = {each["strategy"]: each for each in json.loads(out)}
    data_parallel = {"DP", "SDP", "ZeRO-2", "SDP, recompute", "DP and SDP mixed", "PP2, 1F1B"}
    tensor_parallel = {"TP", "TP, selective recompute", "TP, sequence parallel", "DP, SDP and TP mixed"}
    context_parallel = {"CP, ring", "CP, Ulysses"}
    assert set(found) == {*data_parallel, "SDP, selective recompute", *tensor_parallel, *context_parallel}
    assert all(each["equal"] for each in found.values())


@pytest.mark.slow
def test_a_family(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(monkeypatch, capsys, "llama-tiny", "--devices", "2")
    assert status == 0, err
    for name in ("DP", "PP2, 1F1B", "TP", "TP, sequence parallel", "DP, SDP and TP mixed"):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{name}  ")]
        assert line.split()[-1] == "equal", line


@pytest.mark.slow
def test_a_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    galvatron.plan("gpt2-tiny", "cpu-4", batch=8).save(tmp_path / "plan.json")
    status, out, err = _run(monkeypatch, capsys, str(tmp_path / "plan.json"), "--json")
    assert status == 0, err
    assert json.loads(out) == [{"strategy": "gpt2-tiny", "equal": True, "reason": ""}]
    status, _, err = _run(monkeypatch, capsys, str(tmp_path / "plan.json"), "--devices", "2")
    assert status == 2
    assert "is for 4; leave it out" in err


def test_a_difference_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = [Verdict(name="DP", equal=True), Verdict(name="SDP", equal=False, reason="its loss is 2 instead of 1")]
    monkeypatch.setattr(checking, "measured", lambda job, progress: verdicts)
    status, out, err = _run(monkeypatch, capsys, "llama-tiny")
    assert status == Unequal.exit_status
    assert "differs: its loss is 2 instead of 1" in out
    assert "1 of 2 differ from the stock model in one process: SDP" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lama-tiny",), "did you mean llama-tiny"),
        (("llama-tiny", "--devices", "17"), "devices: 17 given; expected 1 to 16"),
        (("nowhere.json",), "no such file"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    status, out, err = _run(monkeypatch, capsys, *arguments)
    assert status == 2
    assert out == ""
    assert says in err


def test_plans_for_many_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    galvatron.plan("llama3-8b", "h100-64", batch=64).save(tmp_path / "plan.json")
    status, _, err = _run(monkeypatch, capsys, str(tmp_path / "plan.json"))
    assert status == 2
    assert "is for 64 devices; expected 1 to 16" in err


@pytest.mark.slow
def test_what_no_process_can_build_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = _run(monkeypatch, capsys, _folder(tmp_path, architectures=["Qwen2ForNothing"]), "--devices", "1")
    assert status == 2
    assert "architectures names 'Qwen2ForNothing'" in err


@pytest.mark.slow
def test_a_model_with_experts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    status, out, err = _run(monkeypatch, capsys, _folder(tmp_path, **mixtral), "--devices", "2", "--json")
    assert status == 0, err
    found = {each["strategy"]: each["equal"] for each in json.loads(out)}
    assert {"EP", "EP over SDP, recompute", "EP beside TP"} <= found.keys()
    assert all(equal for name, equal in found.items() if "EP" in name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "output_router_logits": True}, "balance"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}, "a sliding window"),
    ],
)
def test_why_sequences_are_not_divided(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fields: dict[str, Any],
    said: str,
) -> None:
    """Not that the embedding and the head could be."""
    status, out, err = _run(monkeypatch, capsys, _folder(tmp_path, **fields), "--devices", "2", "--json")
    assert status == 0, err
    (context,) = (each for each in json.loads(out) if each["strategy"].startswith("CP"))
    assert context["equal"] is None
    assert said in context["reason"]
