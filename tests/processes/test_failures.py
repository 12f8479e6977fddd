"""What people see when a job cannot start, or when one of its ranks fails: under torchrun, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from oracle import Case
from parity import plan_for
from small_models import config

_SCRIPT = """
import sys, torch, galvatron
torch.set_num_threads(1)
plan = galvatron.Plan.load(sys.argv[1])
model = galvatron.parallelize(None, plan, device="cpu")
if model.rank == 1:
    raise ValueError("the disk of rank 1 is full")
generator = torch.Generator().manual_seed(0)
batch = {name: torch.randint(5, (plan.batch, 8), generator=generator) for name in ("input_ids", "labels")}
while True:
    model.forward_backward(batch)
"""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = Case(config=config("bert"), stages=[["dp2"] * 4], batch=4)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan_for(case).save(path)
    return path


def _run(
    processes: int, script: Path, plan: Path, content: str = _SCRIPT
) -> tuple[subprocess.CompletedProcess[str], float]:
    script.write_text(content, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, str(script), str(plan)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    return done, time.monotonic() - begin


@pytest.mark.slow
def test_wrong_number_of_processes_is_said_once_without_a_traceback(tmp_path: Path, plan_file: Path) -> None:
    done, _ = _run(1, tmp_path / "train.py", plan_file)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "world size: 1 processes are running, but the plan is for 2 devices" in errors[0]
    assert "train.py" not in done.stderr.split("error: ")[0]


@pytest.mark.slow
def test_the_rank_that_failed_is_shown_first_and_all_stop(tmp_path: Path, plan_file: Path) -> None:
    """Rank 0 trains on and hangs in a collective; rank 1's error is what stands at the top."""
    done, seconds = _run(2, tmp_path / "train.py", plan_file)
    assert done.returncode != 0
    assert seconds < 120
    first = next(line for line in done.stderr.splitlines() if "rank" in line and "W1" not in line[:2])
    assert first.startswith("rank 1 failed:")
    assert "ValueError: the disk of rank 1 is full" in done.stderr
    position = done.stderr.index("the disk of rank 1 is full")
    assert "Connection" not in done.stderr[:position]


_FEWER = """
import sys, torch, galvatron
torch.set_num_threads(1)
plan = galvatron.Plan.load(sys.argv[1])
model = galvatron.parallelize(None, plan, device="cpu")
batch = {name: torch.ones(plan.batch, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
for _ in range(1 + model.rank):
    float(model.forward_backward(batch))
"""


@pytest.mark.slow
def test_a_rank_with_fewer_batches_is_thought_of(tmp_path: Path, plan_file: Path) -> None:
    done, _ = _run(2, tmp_path / "train.py", plan_file, _FEWER)
    assert done.returncode != 0
    assert "rank 1 failed:" in done.stderr
    assert (
        "A rank that this one waited for has ended. If it says no reason of its own, it had fewer batches"
        in done.stderr
    )


_SESSION = """
import torch, galvatron
torch.set_num_threads(1)
model = galvatron.parallelize(None, galvatron.Plan.load({plan!r}), device="cpu")
batch = {{name: torch.ones(4, 8, dtype=torch.int64) for name in ("input_ids", "labels")}}
raise ValueError("a typing mistake")
raise KeyError("another")
print("loss", float(model.forward_backward(batch)))
model.forward_backward({{}})
print("still", "there")
"""


@pytest.mark.slow
def test_at_a_prompt_without_torchrun(tmp_path: Path) -> None:
    """A plan for one device needs no process group, and an error does not end the session."""
    plan = tmp_path / "plan.json"
    plan_for(Case(config=config("bert"), stages=[["single"] * 4], batch=4)).save(plan)
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=_SESSION.format(plan=str(plan)),
        capture_output=True,
        text=True,
        timeout=180,
        env={key: value for key, value in os.environ.items() if key not in left_out} | {"PYTHONWARNINGS": "ignore"},
    )
    assert "ValueError: a typing mistake" in done.stderr
    assert "KeyError: 'another'" in done.stderr
    assert done.stderr.count("a typing mistake") == 1
    assert "loss " in done.stdout
    assert "error: batch: input_ids, labels missing; it has nothing" in done.stderr
    assert "still there" in done.stdout
