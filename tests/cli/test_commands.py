"""The command line as a person and as a script use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from galvatron import cli


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, as ``main`` would from a shell."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["galvatron", *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return Done(status, captured.out, captured.err)

    return call


PLAN = ("plan", "bert-huge-32", "--cluster", "titan-rtx-8", "--memory", "8GiB", "--paper")


def test_plan_json_has_what_scripts_need(run: Run) -> None:
    done = run(*PLAN, "--json")
    plan = json.loads(done.out)
    assert done.status == 0
    assert plan["throughput"] == pytest.approx(plan["batch"] / plan["iteration_s"])
    assert plan["batch"] % plan["micro_batches"] == 0
    assert plan["certificate"]["gap"] == 0
    assert plan["search_s"] > 0
    assert [device for stage in plan["stages"] for device in stage["devices"]] == list(range(8))
    assert sum(len(stage["layers"]) for stage in plan["stages"]) == 34
    assert all(layer["strategy"] for stage in plan["stages"] for layer in stage["layers"])
    assert all(0 < stage["memory_bytes"] <= 8 * 2**30 for stage in plan["stages"])


def test_plan_then_explain(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    done = run(*PLAN, "--output", path)
    assert done.status == 0
    assert "samples/s" in done.out
    assert "proven optimal" in done.out
    explained = run("explain", path)
    assert explained.status == 0
    for space in ("full", "dp", "tp", "pp", "sdp", "3d", "dp+tp", "dp+pp"):
        assert f"\n{space} " in explained.out
    assert "One more GiB" in explained.out
    spaces = json.loads(run("explain", path, "--json").out)["spaces"]
    best = {entry["space"]: entry["throughput"] or 0 for entry in spaces}
    assert best["full"] == max(best.values()), "the full space holds all the others"
    assert best["dp"] == 0, "pure DP needs 16 bytes a parameter and does not fit 8 GiB (paper: OOM)"


def test_square_brackets_in_a_name_are_no_markup(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan[").mkdir()
    for name in ("plan[v2].json", "plan[/b].json", "[bold]:smile:.json"):
        done = run("plan", "bert-tiny", "-c", "cpu-4", "--batch", "8", "-o", str(tmp_path / name))
        assert done.status == 0
        assert f"written to {tmp_path / name};" in done.out
        assert (tmp_path / name).exists()


def test_every_line_fits_a_terminal_of_80_columns(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off either: rich would show that by an ellipsis in place of text."""
    monkeypatch.setenv("COLUMNS", "80")
    path = str(tmp_path / "plan.json")
    made = run("plan", "llama3-8b", "-c", "h100-8", "--batch", "16", "-o", path)
    commands = [
        ("explain", path),
        ("compare", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "8GiB,12GiB,16GiB", "--batch", "16"),
        ("clusters",),
        ("clusters", "h100-64"),
        ("models",),
        ("models", "llama3-8b"),
        ("strategies", "--devices", "8"),
        ("price", "llama3-8b", "-c", "h100-2", "--from", "megatron", "--bf16 --global-batch-size 4"),
    ]
    for done in (made, *(run(*command) for command in commands)):
        assert done.status == 0
        for line in done.out.splitlines():
            assert len(line.rstrip()) <= 80 or str(tmp_path) in line, line
            assert "…" not in line or "batch" in line or "galvatron plan …" in line, line
    assert "8192 tokens a sample" in made.out
    assert "tokens/s" in made.out
    assert "of peak (MFU)" in made.out
    assert "left to the allocator" in made.out


def test_a_letter_stands_beside_its_strategy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal: the legend's lines end between two entries."""
    request = ("plan", "llama3-8b", "-c", "h100-8", "--batch", "128")
    for width in ("80", "60", "44"):
        monkeypatch.setenv("COLUMNS", width)
        lines = [line for line in run(*request).out.splitlines() if re.match(r"  [A-D]  ", line)]
        assert (len(lines) > 1) == (width != "80")
        assert sum(len(re.findall(r"[A-D]  [ds]", line)) for line in lines) == 4
        assert all(len(line.rstrip()) <= int(width) for line in lines)


def test_a_terminal_that_knows_ascii_alone_gets_no_escapes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "galvatron", "plan", "bert-tiny", "-c", "cpu-4", "--batch", "16"],
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    shown = done.stdout.decode("ascii")
    assert "on 4 x CPU process" in shown
    assert "0-3 " in shown
    assert "####......" in shown
    assert "\\u" not in shown


def test_a_pipe_gets_plain_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "galvatron", *PLAN], capture_output=True, text=True, timeout=60, check=True
    )
    assert "\x1b" not in done.stdout


def test_same_command_same_bytes(tmp_path: Path) -> None:
    """Two processes with different hash seeds write identical plans."""
    texts = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "galvatron",
                "plan",
                "swin-huge-32",
                "-c",
                "titan-rtx-8",
                "--memory",
                "8GiB",
                "-o",
                path,
            ],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]


def test_compare_puts_spaces_side_by_side(run: Run) -> None:
    command = ("compare", "vit-huge-32", "--cluster", "titan-rtx-8", "--memory", "8GiB,16GiB", "--paper")
    done = run(*command)
    assert done.status == 0
    assert "8.00 GiB" in done.out
    assert "OOM" in done.out
    cells = {(c["space"], c["memory_bytes"] >> 30): c["throughput"] for c in json.loads(run(*command, "--json").out)}
    assert cells["dp", 8] is None, "the paper's DDP runs out of memory on ViT-Huge-32 at 8G"
    assert cells["dp", 16] > 0
    for budget in (8, 16):
        assert cells["full", budget] == max(value or 0 for (_, memory), value in cells.items() if memory == budget)


@pytest.mark.parametrize(("flag", "total"), [("--prune", 22), ("--no-prune", 34)])
def test_strategies_counts_the_papers_candidates(run: Run, flag: str, total: int) -> None:
    counted = json.loads(run("strategies", "--devices", "8", flag, "--json").out)
    assert counted["total"] == total
    assert sum(len(names) for names in counted["by_pipeline_degree"].values()) == total
    assert f"{total} candidate strategies" in run("strategies", "--devices", "8", flag).out


def test_models_and_clusters_are_listed(run: Run) -> None:
    listed = run("models").out
    assert all(name in listed for name in ("bert-huge-32", "llama3-70b", "gpt3-175b"))
    assert "encoder" in run("models", "bert-huge-96").out
    clusters = run("clusters").out
    assert all(name in clusters for name in ("titan-rtx-8", "a100-80gb", "rtx5090", "b200"))
    assert "GB/s" in run("clusters", "a100-64").out
    assert {entry["name"] for entry in json.loads(run("clusters", "--json").out)} >= {"l4", "rtx4090"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "bert-hug-32", "-c", "titan-rtx-8"), "bert-huge-32"),
        (("plan", "bert-huge-32", "-c", "titan-rtx"), "titan-rtx-8"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "8 apples"), "memory"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "-8GB"), "memory"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "nan"), "memory"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "80GB"), "has only"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "0"), "memory"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--batch", "0"), "batch"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--batch", "8", "--batch-step", "8"), "contradict"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--space", "4d"), "dp+tp"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--schedule", "zigzag"), "gpipe"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--precision", "bf16"), "no bf16"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--precision", "fp8"), "fp32"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--cuts", "random"), "exact"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--paper", "--schedule", "1f1b"), "--paper"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--paper", "--recompute"), "recompute"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--sequence-length", "100000"), "512"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--space", "dp", "--zero2"), "--zero2"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--space", "tp", "--hybrid-sharding"), "--hybrid-sharding"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--profile", "titan-rtx-swin-huge"), "none of the layers"),
        (("plan", "bert-huge-0", "-c", "titan-rtx-8"), "bert-huge"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "--profile", "nowhere.toml"), "nowhere.toml"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "-o", "/no/such/folder/plan.json"), "cannot write"),
        (("plan", "bert-huge-32", "-c", "titan-rtx-8", "-o", ""), "expected a name that ends in .json"),
        (("models", "bert-base", "-o", ""), "expected a name that ends in .json"),
        (("plan", "bert-huge-32", "-c", "rtx4090", "--devices", "12"), "12 devices of rtx4090"),
        (("plan", "bert-huge-32", "-c", "rtx4090", "--node-link", "200Gb"), "is one node"),
        (("compare", "bert-huge-32", "-c", "titan-rtx-8", "--memory", "8GB,x"), "memory"),
        (("explain", "no-such-plan.json"), "no-such-plan.json"),
        (("strategies", "--devices", "0"), "devices"),
        (("models", "bert"), "bert-base"),
        (("clusters", "h1000"), "h100"),
        (("clusters", "--toml"), "a100:2x8"),
        (("clusters", "a100", "--toml", "--json"), "contradict each other"),
        (("models", "bert-tiny", "--paper", "--precision", "bf16"), "--precision bf16 is asked for"),
        (("plan", "bert-tiny", "-c", "titan-rtx-8", "--memory", "8"), "which is 8 bytes; say the unit: 8GB or 8GiB"),
        (("plan", "bert-tiny", "-c", "titan-rtx-8", "--memory", "32GiB"), "32.0 GiB (34359738368 bytes) given"),
        (
            ("plan", "bert-tiny", "-c", "titan-rtx-8", "--pin", "encoder=tp4"),
            "4 does not divide its 2 heads, words or channels; 'galvatron models MODEL' shows them",
        ),
        (("plan", "bert-tiny", "-c", "titan-rtx-8", "--pin", "encoder=ring2"), "add --context-parallel"),
    ],
)
def test_bad_input_is_explained_with_status_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert said in done.err
    assert not done.out


def test_the_folder_of_a_page_is_checked_before_the_plan_is_read(run: Run) -> None:
    for option in ("--html", "--trace"):
        done = run("explain", "no-such-plan.json", option, "/no/such/folder/page")
        assert "there is no folder '/no/such/folder'" in done.err


def test_advice_is_not_what_was_given(run: Run) -> None:
    full = run("plan", "bert-tiny", "-c", "cpu-4", "--pipeline", "3")
    assert full.err.rstrip().endswith("whose pipelines have 1, 2, 4 stages; allow more")
    assert "use --space full" in run("plan", "bert-tiny", "-c", "cpu-4", "--pipeline", "2", "--space", "dp").err


def test_unknown_options_are_errors(run: Run) -> None:
    assert run(*PLAN, "--turbo").status == 2
    assert run("plan", "bert-huge-32").status == 2, "a cluster is required"


def test_infeasible_budgets_say_the_smallest_that_fits(run: Run) -> None:
    """Status 3; the budget named fits, a little less does not."""
    base = ("plan", "bert-huge-48", "--cluster", "titan-rtx-8", "--paper", "--batch", "32")
    done = run(*base, "--memory", "8GiB")
    assert done.status == 3
    assert "smallest budget that fits" in done.err
    assert "recompute" in done.err
    assert "more devices" in done.err
    assert "smaller batch" in done.err
    least = int(done.err.split("(")[1].split(" bytes")[0])
    assert run(*base, "--memory", str(least)).status == 0
    assert run(*base, "--memory", str(least - 1)).status == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bert-tiny", "--space", "dp", "--batch", "7"), "data degree of 8"),
        (("gpt2", "--batch", "1", "--pipeline", "1"), "data degree of 2, 4, 8, as layers 'decoder' must have"),
        (
            ("gpt2", "--batch", "4", "--pin", "embedding=dp8", "--pipeline", "1"),
            "data degree of 8, as layers 'embedding'",
        ),
        (("gpt2", "--batch", "1", "--pipeline", "4"), "at least 4 micro-batches, but a batch has 1 sample"),
        (("bert-base", "--space", "tp"), "does not divide the heads of 'encoder' (12)"),
        (("t5-tiny", "--space", "pp", "--batch", "8"), "more stages than the model's 7 layers"),
        (("bert-base", "--space", "pp", "--max-micro-batches", "2"), "at least 8 micro-batches"),
        (("bert-base", "--batch-step", "16", "--max-batch", "8"), "max-batch: 8"),
        (("bert-base", "--max-batch", "100000000000"), "max-batch"),
        (("bert-base", "--batch", "99999999999999999999"), "batch"),
        (("bert-base", "--max-batch", "4000000"), "batch-step"),
    ],
)
def test_what_nothing_divides_is_bad_input(run: Run, arguments: tuple[str, ...], said: str) -> None:
    """No memory would help: the message names the numbers that are in the way."""
    done = run("plan", *arguments, "--cluster", "titan-rtx-8")
    assert done.status == 2
    assert said in done.err
