"""Virtual GPUs: several ranks on one GPU, each with its slice of the chip, are a small cluster with real NCCL.

CUDA MPS runs the ranks' kernels side by side and gives each its part of the multiprocessors. NCCL refuses two ranks on
one GPU of one host, so each is told that it is on a host of its own; messages then go through loopback sockets. No
torch: the process that starts the ranks does without it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.processes.pacing import pace_connections

__all__ = ["be_virtual", "check_virtual", "virtual_devices", "virtual_gpus"]

_DEVICES = "GALVATRON_VIRTUAL"
"""In the environment of the ranks: how many of them share the GPU."""
_CONTROL = "nvidia-cuda-mps-control"
_CLEAN_UP = f'read -r _; echo quit | {_CONTROL}; rm -rf "$1"'
_MOST = 48
"""Clients that MPS serves at once."""
_PATIENCE_S = 5.0
_CONNECTIONS = 96
"""Queues from processes to the GPU that MPS has to give away, with some to spare."""
_ENOUGH_CONNECTIONS = 8
"""For one process: what CUDA gives it without MPS."""
_LINK_BYTES_PER_S = 2_000_000_000
"""What each group of a rank may send: two cores a rank can do a little more."""
_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of the CUDA driver."""


def virtual_devices() -> int | None:
    """How many virtual GPUs there are, where this process and its children have such."""
    text = os.environ.get(_DEVICES)
    return int(text) if text else None


@contextmanager
def virtual_gpus(devices: int | None) -> Iterator[None]:
    """While this lasts, processes that are started share the first GPU as so many devices; None: nothing changes."""
    if devices is None:
        yield
        return
    _check(devices)
    folder = tempfile.mkdtemp(prefix="galvatron-mps-")
    wanted = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // devices),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that asking for GPUs does not make this process one that uses them
        # Of the queues to the GPU a client of MPS has few unless it asks for more: not enough for computing, several
        # groups and transfers, which would then wait for each other.
        "CUDA_DEVICE_MAX_CONNECTIONS": str(min(_CONNECTIONS // devices, _ENOUGH_CONNECTIONS)),
        _DEVICES: str(devices),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with _served(folder):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_virtual(devices: int) -> None:
    """Refuse a plan for more devices than there are virtual GPUs, where there are such."""
    virtual = virtual_devices()
    if virtual is not None and devices > virtual:
        raise InvalidInput(f"virtual: {virtual} given, but the plan is for {devices} devices; give --virtual {devices}")


def be_virtual(rank: int, *, in_turn: bool = False) -> None:
    """On a rank, before it uses CUDA: to be told from the others on its GPU, to reach them through links of one speed,
    and to leave the cores to them while it waits for the GPU. The cores carry the messages here, and a thread that
    waits would else take one. ``in_turn``: one thread carries the messages of all groups, each when those before it are
    done. That is faster, but only for ranks that all begin their messages in one order: stages of a pipeline, which
    send to each other, would wait for each other for ever."""
    if virtual_devices() is None:
        return
    _pace_links()
    # One channel: more do not make sockets faster, but take multiprocessors from computing.
    os.environ.update(
        NCCL_HOSTID=f"virtual{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_MAX_NCHANNELS="1"
    )
    # With a thread for each group, messages of two groups at once take up to nine times as long.
    os.environ.setdefault("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1" if in_turn else "0")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU, as whoever uses it will say
        return
    device = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    status = status or driver.cuDevicePrimaryCtxSetFlags_v2(device, _BLOCKING_SYNC)
    if status:
        raise GalvatronError(f"virtual: rank {rank} cannot use the GPU through CUDA MPS: error {status} of the driver")


@cache
def _pace_links() -> None:
    pace_connections(_LINK_BYTES_PER_S)


def _check(devices: int) -> None:
    if not 1 <= devices <= _MOST:
        raise InvalidInput(f"virtual: {devices} given; expected 1 to {_MOST} devices, as many as CUDA MPS serves")
    if "RANK" in os.environ:
        raise InvalidInput("virtual: not under torchrun, whose processes are there already; call galvatron by itself")
    otherwise = "leave --virtual out, and without a GPU the ranks are CPU processes (--devices)"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "0":
        raise InvalidInput(
            f"virtual: CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}, but virtual GPUs are slices of "
            "the first one; leave the variable out"
        )
    if shutil.which(_CONTROL) is None:
        raise InvalidInput(
            f"virtual: {devices} given, but CUDA MPS is missing here: {_CONTROL}, a part of NVIDIA's driver on Linux, "
            f"is not found; {otherwise}"
        )
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        listed = ""
    if "GPU 0" not in listed:
        raise InvalidInput(f"virtual: {devices} given, but NVIDIA's driver lists no GPU here; {otherwise}")


@contextmanager
def _served(folder: str) -> Iterator[None]:
    """Run the MPS daemon, and let a process end it that outlives this one, however this one ends."""
    for name in ("pipe", "log"):
        Path(folder, name).mkdir()
    started = subprocess.run([_CONTROL, "-d"], capture_output=True, text=True, check=False)
    if started.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        said = (started.stderr or started.stdout).strip() or f"status {started.returncode}"
        raise InvalidInput(f"virtual: CUDA MPS does not start: {said}; see NVIDIA's notes on MPS for what it needs")
    janitor = subprocess.Popen(
        ["sh", "-c", _CLEAN_UP, "sh", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()  # as it is, too, when this process is killed
        with suppress(subprocess.TimeoutExpired):  # the daemon waits for all who use it, perhaps this process
            janitor.wait(_PATIENCE_S)
