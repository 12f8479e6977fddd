"""Starts the ranks of a benchmark: plain processes, on virtual GPUs where the caller has made them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from galvatron.processes.environment import defaults_if_unset


def ask(script: Path, spec: dict[str, Any], timeout_s: float) -> tuple[list[dict[str, Any]], int]:
    """Run ``script rank SPEC`` on ``spec["devices"]`` ranks: the lines of JSON that they :func:`tell`, and a status."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.jsonl"
        status = launch(script, ["rank", json.dumps({**spec, "answer": str(answer)})], spec["devices"], timeout_s)
        lines = answer.read_text(encoding="utf-8").splitlines() if answer.exists() else []
    return [json.loads(line) for line in lines], status


def tell(spec: dict[str, Any], found: dict[str, Any]) -> None:
    """For one rank of those that were asked."""
    with Path(spec["answer"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


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
