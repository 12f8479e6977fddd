"""Virtual GPUs: what the ranks are given, and that nothing is left behind. NVIDIA's programs are stand-ins here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron.cli import app
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families import load_cluster, load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request
from galvatron.processes.virtual import _pace_links, be_virtual, check_virtual, virtual_devices, virtual_gpus
from galvatron.runtime.parallelize import parallelize
from galvatron.train.worker import train_rank

_CHILD = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVIDIA's programs: one notes what it is told, with its pipe's folder; the other lists a GPU."""
    notes = tmp_path / "notes"
    _program(
        tmp_path / "nvidia-cuda-mps-control",
        f'if [ "$1" = -d ]; then said=start; else read -r said; fi\necho "$said $CUDA_MPS_PIPE_DIRECTORY" >> {notes}\n',
    )
    _program(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H200'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return notes


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    path.chmod(0o755)


def test_children_share_the_gpu_and_nothing_stays(driver: Path) -> None:
    before = dict(os.environ)
    with virtual_gpus(8):
        assert virtual_devices() == 8
        child = json.loads(subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, check=True).stdout)
        pipes = Path(child["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipes.is_dir()
        assert child["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12"
        assert child["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
        assert child["GALVATRON_VIRTUAL"] == "8"
    assert driver.read_text(encoding="utf-8").splitlines() == [f"start {pipes}", f"quit {pipes}"]
    assert not pipes.parent.exists()
    assert dict(os.environ) == before
    assert virtual_devices() is None


def test_after_an_error_too(driver: Path) -> None:
    with pytest.raises(ZeroDivisionError), virtual_gpus(2):
        raise ZeroDivisionError
    assert driver.read_text(encoding="utf-8").split()[::2] == ["start", "quit"]


def test_a_killed_program_leaves_no_daemon(driver: Path) -> None:
    script = (
        "from galvatron.processes.virtual import virtual_gpus\n"
        "with virtual_gpus(4):\n    print(1, flush=True); input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while "quit" not in driver.read_text(encoding="utf-8") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert driver.read_text(encoding="utf-8").split()[::2] == ["start", "quit"]


def test_none_changes_nothing() -> None:
    before = dict(os.environ)
    with virtual_gpus(None):
        assert dict(os.environ) == before


def test_ranks_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    paced: list[int] = []
    monkeypatch.setattr("galvatron.processes.virtual.pace_connections", paced.append)
    _pace_links.cache_clear()
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS",
                 "NCCL_COMM_SPLIT_SHARE_RESOURCES"):  # fmt: skip
        monkeypatch.setenv(name, "as the user has it")
    be_virtual(3)
    assert os.environ["NCCL_HOSTID"] == "as the user has it"  # no virtual GPUs: none of our business
    assert not paced
    monkeypatch.setenv("GALVATRON_VIRTUAL", "4")
    be_virtual(3)
    assert os.environ["NCCL_HOSTID"] == "virtual3"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_MAX_NCHANNELS"] == "1"
    assert os.environ["NCCL_COMM_SPLIT_SHARE_RESOURCES"] == "as the user has it"  # to compare with
    for in_turn in (False, True):
        monkeypatch.delenv("NCCL_COMM_SPLIT_SHARE_RESOURCES")
        be_virtual(3, in_turn=in_turn)
        assert os.environ["NCCL_COMM_SPLIT_SHARE_RESOURCES"] == str(int(in_turn))
    assert len(paced) == 1  # and not twice


def test_many_share_the_queues(driver: Path) -> None:
    """MPS has some hundred; a process that asks for more than are left does not start."""
    with virtual_gpus(48):
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "2"


def test_without_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["profile", "cluster", "--virtual", "8"])
    assert isinstance(result.exception, InvalidInput)
    assert "virtual: 8 given, but CUDA MPS is missing here: nvidia-cuda-mps-control" in str(result.exception)


def test_without_a_gpu(driver: Path) -> None:
    _program(driver.parent / "nvidia-smi", "echo 'No devices were found' >&2; exit 6\n")
    with pytest.raises(InvalidInput, match="driver lists no GPU here"), virtual_gpus(8):
        pass
    assert not driver.exists()


def test_a_daemon_that_does_not_start(driver: Path) -> None:
    _program(
        driver.parent / "nvidia-cuda-mps-control", "echo 'An instance of this daemon is already running'; exit 1\n"
    )
    with pytest.raises(InvalidInput, match="does not start: An instance of this daemon"), virtual_gpus(8):
        pass
    assert virtual_devices() is None


@pytest.mark.parametrize("devices", [0, -1, 49])
def test_numbers_that_cannot_be(devices: int) -> None:
    with pytest.raises(InvalidInput, match=f"virtual: {devices} given; expected 1 to 48"), virtual_gpus(devices):
        pass


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES is '1'"), virtual_gpus(2):
        pass


def test_a_plan_for_more_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    check_virtual(64)
    monkeypatch.setenv("GALVATRON_VIRTUAL", "4")
    check_virtual(4)
    with pytest.raises(InvalidInput, match="virtual: 4 given, but the plan is for 8 devices; give --virtual 8"):
        check_virtual(8)


def test_not_under_torchrun(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidInput, match="not under torchrun"), virtual_gpus(2):
        pass


@pytest.mark.parametrize("stages", [1, 2])
def test_only_one_stage_has_its_messages_in_turn(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that send to each other would wait for each other for ever."""
    joined: list[bool] = []

    def join(*, in_turn: bool, alone: bool = False) -> None:
        joined.append(in_turn)
        raise InvalidInput("as far as this test goes")

    monkeypatch.setenv("GALVATRON_VIRTUAL", "8")
    plan = _plan(stages)
    monkeypatch.setattr("galvatron.runtime.parallelize.join", join)
    with pytest.raises(InvalidInput, match="as far as"):
        parallelize(None, plan)
    monkeypatch.setattr("galvatron.train.worker.join", join)
    monkeypatch.setattr("galvatron.train.worker.RunFolder.load", lambda folder: (plan, None))
    with pytest.raises(InvalidInput, match="as far as"):
        train_rank(Path("run"))
    assert joined == [stages == 1] * 2


def _plan(stages: int) -> Plan:
    model = load_model("bert-huge-32", Training())
    request = Request(model=model, cluster=load_cluster("titan-rtx-8"), batch=8)
    halves = [["dp8"] * len(model.layers)] if stages == 1 else [["dp4"] * 17, ["dp4"] * (len(model.layers) - 17)]
    return priced(request, halves)
