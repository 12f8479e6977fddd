"""``galvatron doctor``: what of this machine works for planning, training and measuring, and what to do about the rest.

Needs nothing but Python itself: torch is asked in a process of its own, so that its absence, or a driver that hangs, is
one line of the answer.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from galvatron.core.units import GIB, format_bytes

__all__ = ["Finding", "State", "examine"]

_TIMEOUT_S = 90
_LEAST_DISK = 10 * GIB
_LEAST_SHARED = GIB
_LEAST_FILES = 1024
_OLDEST = (3, 11)


class State(StrEnum):
    """How it is with one thing."""

    OK = "ok"
    WARN = "warn"
    """Something does not work here that not everybody needs."""
    FAIL = "fail"
    """Training does not work here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    what: str
    state: State
    found: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def examine(folder: Path | None = None) -> list[Finding]:
    """Everything that can be seen from here. ``folder``: where runs would be written; None: the working directory."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _torch,
        _driver,
        _compiler,
        _memory,
        lambda: _disk(folder or Path.cwd()),
        _network,
        _limits,
    ]
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    right = sys.version_info[:2] >= _OLDEST
    yield Finding("python", State.OK if right else State.FAIL, here, "" if right else "install Python 3.11 or newer")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("processor", State.OK, f"{cores} cores for this process")


def _packages() -> Iterator[Finding]:
    needed = {
        "transformers": "pip install 'galvatron[torch]' to train Hugging Face models",
        "datasets": "pip install 'galvatron[data]' to read Parquet, Arrow and datasets",
        "peft": "pip install 'galvatron[lora]' to train adapters",
    }
    for name in ("galvatron", "numpy", "pydantic"):
        found = _version(name)
        yield Finding(
            name, State.OK if found else State.FAIL, found or "missing", "" if found else f"pip install {name}"
        )
    for name, remedy in needed.items():
        found = _version(name)
        yield Finding(name, State.OK if found else State.WARN, found or "not installed", "" if found else remedy)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_ASK_TORCH = """
import json, torch
import torch.distributed as dist
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": None, "bf16": None}
facts["gloo"] = dist.is_available() and dist.is_gloo_available()
if torch.cuda.is_available():
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    facts["bf16"] = torch.cuda.is_bf16_supported()
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        facts["gpus"].append([torch.cuda.get_device_name(index), free, total])
    facts["peers"] = all(
        torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b
    )
try:
    import triton
    facts["triton"] = triton.__version__
except ImportError:
    facts["triton"] = None
print(json.dumps(facts))
"""


def _torch() -> Iterator[Finding]:
    if _version("torch") is None:
        yield Finding(
            "torch", State.FAIL, "not installed: planning works, training does not", "pip install 'galvatron[torch]'"
        )
        return
    facts, problem = _asked_torch()
    if facts is None:
        yield Finding("torch", State.FAIL, problem, "run: python -c 'import torch; print(torch.cuda.is_available())'")
        return
    yield Finding("torch", State.OK, f"{facts['version']}, CUDA {facts['cuda'] or 'not built in'}")
    if not facts["gloo"]:
        yield Finding("gloo", State.FAIL, "not in this torch: processes on CPUs cannot talk", "install torch from PyPI")
    yield from _gpus(facts)
    compiles = facts["triton"] is not None or not facts["gpus"]
    if not compiles:
        yield Finding(
            "triton", State.WARN, "not installed: blocks cannot be compiled", "pip install triton, or --no-compile"
        )


def _asked_torch() -> tuple[dict[str, Any] | None, str]:
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_S} s"
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        return None, f"does not start: {lines[-1] if lines else f'status {ran.returncode}'}"
    facts: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return facts, ""


def _gpus(facts: dict[str, Any]) -> Iterator[Finding]:
    if not facts["gpus"]:
        hint = "" if facts["cuda"] is None else "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        state = State.WARN if shutil.which("nvidia-smi") else State.OK
        yield Finding("gpus", state, "none that torch can use: training runs on CPU processes", hint)
        return
    for index, (name, free, total) in enumerate(facts["gpus"]):
        used = (total - free) / total
        found = f"{name}, {format_bytes(total)}, {used:.0%} in use"
        busy = used > 0.05
        yield Finding(
            f"gpu {index}",
            State.WARN if busy else State.OK,
            found,
            "stop what else uses it: nvidia-smi" if busy else "",
        )
    if not facts["bf16"]:
        yield Finding("bf16", State.WARN, "these GPUs have none", "plan with --precision fp32")
    if len(facts["gpus"]) > 1:
        direct = facts["peers"]
        yield Finding(
            "links",
            State.OK if direct else State.WARN,
            "each GPU reaches the others directly"
            if direct
            else "no peer-to-peer between some GPUs: data pass the host",
            "" if direct else "galvatron profile cluster measures what is left",
        )
    nccl = facts["nccl"]
    yield Finding(
        "nccl", State.OK if nccl else State.FAIL, nccl or "missing", "" if nccl else "install torch with CUDA"
    )


def _driver() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        return
    mps = shutil.which("nvidia-cuda-mps-control")
    found = "available: --virtual shares one GPU" if mps else "nvidia-cuda-mps-control is not on PATH"
    yield Finding(
        "mps", State.OK if mps else State.WARN, found, "" if mps else "install the CUDA driver's MPS for --virtual"
    )


def _compiler() -> Iterator[Finding]:
    name = next((each for each in (os.environ.get("CC"), "cc", "gcc", "clang") if each and shutil.which(each)), None)
    yield Finding(
        "compiler",
        State.OK if name else State.WARN,
        shutil.which(name) or name if name else "no C compiler: blocks cannot be compiled (torch.compile)",
        "" if name else "install gcc, or train with --no-compile",
    )


def _memory() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < _LEAST_SHARED
        remedy = "start the container with --shm-size=8g" if small else ""
        yield Finding(
            "shared memory", State.WARN if small else State.OK, f"{format_bytes(free)} free in {shared}", remedy
        )


def _disk(folder: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        yield Finding("disk", State.FAIL, f"{folder}: {error.strerror or error}", "change to a folder that exists")
        return
    if not writable:
        yield Finding("disk", State.FAIL, f"{folder} cannot be written to", "give --output elsewhere")
        return
    small = free < _LEAST_DISK
    remedy = "a checkpoint takes up to 12 bytes a parameter; make room, or give --output elsewhere" if small else ""
    yield Finding("disk", State.WARN if small else State.OK, f"{format_bytes(free)} free in {folder}", remedy)


def _network() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
        yield Finding("ports", State.OK, "processes of this machine can connect to each other")
    except OSError as error:
        yield Finding("ports", State.FAIL, f"no connection to 127.0.0.1: {error}", "allow local connections")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        yield Finding("host name", State.OK, name)
    except OSError:
        remedy = "several machines: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding("host name", State.WARN, f"{name} has no address", remedy)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _LEAST_FILES
    yield Finding("open files", State.WARN if few else State.OK, f"up to {files}", "ulimit -n 65536" if few else "")
