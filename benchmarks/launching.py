"""Starts the ranks of a benchmark: plain processes, on virtual GPUs where the caller has made them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from galvatron.processes.environment import defaults_if_unset


def launch(script: Path, arguments: Sequence[str], ranks: int, timeout_s: float) -> int:
    """Run ``script`` once a rank; when one fails, or time is up, all are stopped. The first bad status, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(script), *arguments]
        processes.append(subprocess.Popen(command, env={**os.environ, **defaults_if_unset(), **own}))
    return _wait(processes, timeout_s)


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> int:
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            statuses = [process.poll() for process in processes]
            bad = [status for status in statuses if status not in (None, 0)]
            if bad:
                return int(bad[0] or 1)
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(0.2)
        return 124
    finally:
        for process in processes:
            process.kill()
