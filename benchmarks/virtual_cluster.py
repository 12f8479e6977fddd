"""Several ranks on one GPU: a small cluster with real NCCL, for benchmarks.

Each rank gets a slice of the chip through CUDA MPS and believes it is on a host of its own, so that NCCL accepts them
all on one device; traffic goes through loopback sockets. Without a GPU the ranks are plain CPU processes with gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sliced_gpu(ranks: int) -> Iterator[dict[str, str]]:
    """Run MPS; yields the environment under which each of the ranks has its share of the GPU."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        pipes, logs = Path(folder) / "pipe", Path(folder) / "log"
        pipes.mkdir()
        logs.mkdir()
        places = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **places}, check=True)
        try:
            yield {**places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks)}
        finally:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", text=True, env={**os.environ, **places}, check=False
            )


def launch(script: Path, arguments: Sequence[str], ranks: int, shared: dict[str, str], timeout_s: float) -> int:
    """Run ``script`` once a rank; when one fails, or time is up, all are stopped. The first bad status, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"virtual{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(script), *arguments]
        processes.append(subprocess.Popen(command, env={**os.environ, **shared, **own}))
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
