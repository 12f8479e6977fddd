"""The first hour of a new user: a chat model's folder and a file of conversations, trained, stopped, resumed, exported,
and asked what it was taught. Every option is one that the documentation names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Job
from newcomer import TAUGHT, chat_model, write_chat
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import galvatron
from galvatron.cli import main
from galvatron.train.launch import Ended
from galvatron.train.metrics import read_metrics
from galvatron.train.run_folder import RunFolder

_PRESET = Path(galvatron.__file__).parent / "core/files/presets/clusters/cpu-4.toml"


def _first_loss(folder: Path, rows: int) -> float:
    """With transformers alone: the mean over the answers' tokens of the conversations, each by itself."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for question, answer in TAUGHT.items():
        asked = [{"role": "user", "content": question}]
        before = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": answer}])["input_ids"]
        logits = model(torch.tensor([whole])).logits[0]
        losses = functional.cross_entropy(
            logits[len(before) - 1 : -1], torch.tensor(whole[len(before) :]), reduction="sum"
        )
        total, count = total + float(losses.detach()), count + len(whole) - len(before)
    assert rows % len(TAUGHT) == 0, "each is there equally often"
    return total / count


def _says_what_it_was_taught(out: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    for question, answer in TAUGHT.items():
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**asked, max_new_tokens=30, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(made, skip_special_tokens=True) == answer


def _galvatron(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["galvatron", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_from_a_folder_to_a_model_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks are forked here, and signalled as Ctrl-C's handler does; the rest is the command itself."""
    folder, chat = chat_model(tmp_path / "mine"), write_chat(tmp_path / "chat.jsonl")
    (tmp_path / "two.toml").write_text(_PRESET.read_text().replace("units = 4", "units = 2"))
    run, out = RunFolder(tmp_path / "run"), tmp_path / "out"
    stops_at = [10, None]

    def launch(known: RunFolder, processes: int, say: Callable[[str], None]) -> Ended:
        stop = stops_at.pop(0)
        job = Job(known.path, *known.load())
        assert job.world == processes == 2
        if stop is not None:
            job.wait_for_step(stop)
            job.signal(signal.SIGTERM, *range(processes))
        assert job.wait() == [0, 0], job.logs()
        return Ended(0)

    monkeypatch.setattr("galvatron.train.launch.launch", launch)
    options = ["--cluster", str(tmp_path / "two.toml"), "--batch", "16", "--no-pack", "--out", str(run.path)]
    settings = ["--steps", "60", "--lr", "0.01", "--eval-data", str(chat), "--sequence-length", "64"]
    _galvatron(monkeypatch, "train", str(folder), "--data", str(chat), *options, *settings)
    losses = [line["loss"] for line in read_metrics(run.metrics_file)]
    assert 10 <= len(losses) < 60, "it was stopped"
    assert losses[0] == pytest.approx(_first_loss(folder, rows=16), abs=1e-4)
    _galvatron(monkeypatch, "train", "--resume", "--out", str(run.path))
    lines = read_metrics(run.metrics_file)
    assert [line["step"] for line in lines] == [*range(1, 61)]
    assert lines[-1]["evaluation_loss"] < 0.1 < losses[0]
    capsys.readouterr()
    _galvatron(monkeypatch, "train", "--resume", "--out", str(run.path))
    assert "is finished: all 60 steps" in " ".join(capsys.readouterr().out.split())
    _galvatron(monkeypatch, "export", str(run.path), str(out))
    _says_what_it_was_taught(out)


@pytest.mark.slow
def test_the_same_with_the_command_itself_and_a_machine_that_is_measured(tmp_path: Path) -> None:
    folder, chat = chat_model(tmp_path / "mine"), write_chat(tmp_path / "chat.jsonl")
    run, out = RunFolder(tmp_path / "run"), tmp_path / "out"
    environment = {**os.environ, "GALVATRON_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    arguments = ["train", str(folder), "--data", str(chat), "--devices", "2", "--batch", "16", "--no-pack"]
    settings = ["--steps", "400", "--lr", "0.01", "--sequence-length", "64", "--out", str(run.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "galvatron", *arguments, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    end = time.monotonic() + 400
    while not any(line["step"] >= 5 for line in read_metrics(run.metrics_file)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "go on with --resume" in said
    assert "starting 2 processes" in said
    losses = [line["loss"] for line in read_metrics(run.metrics_file)]
    assert losses[0] == pytest.approx(_first_loss(folder, rows=16), abs=1e-4)
    again = ["train", "--resume", "--out", str(run.path), "--steps", str(len(losses) + 60)]
    for verb in (again, ["export", str(run.path), str(out)]):
        done = subprocess.run(
            [sys.executable, "-m", "galvatron", *verb], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    _says_what_it_was_taught(out)
    second = subprocess.run(
        [sys.executable, "-m", "galvatron", *arguments, "--steps", "4", "--out", str(tmp_path / "second")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "measuring" not in second.stderr, "what was measured is used again"
