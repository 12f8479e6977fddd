"""Starts the ranks that measure, or joins those that torchrun started. Imports torch only when it is one of them.

One helper process imports what all need and then forks the ranks: importing it in each would take longer than
measuring.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from galvatron.core.errors import GalvatronError
from galvatron.processes.environment import defaults_if_unset
from galvatron.processes.job import PROGRESS, Job, Progress

__all__ = ["measured", "under_torchrun"]


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher like it, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def measured(job: Job, progress: Progress | None) -> Any:
    """Run the job on all its ranks; under torchrun these are the processes that call this, and all get the result."""
    if under_torchrun():
        from galvatron.processes.ranks import run_here

        return run_here(job, progress)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        # As torchrun does it: processes that share cores would only get into each other's way with more threads.
        environment = {**os.environ, **defaults_if_unset(OMP_NUM_THREADS="1")}
        with subprocess.Popen(
            [sys.executable, "-m", "galvatron.processes", str(answer)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                said = _follow(process, pickle.dumps(job), progress)
            except BaseException:
                process.terminate()
                raise
        if process.returncode or not answer.exists():
            raise GalvatronError(
                f"profiling: its processes ended with status {process.returncode}: {said[-1] if said else 'no word'}"
            )
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, GalvatronError):
        raise result
    return result


def _follow(process: subprocess.Popen[bytes], job: bytes, progress: Progress | None) -> list[str]:
    """Hand over the job and pass progress on; returns all else that was said."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it ended early, and says why below
    said = []
    for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if text.startswith(PROGRESS):
            done, total, what = text.removeprefix(PROGRESS).split(" ", 2)
            if progress is not None:
                progress(int(done), int(total), what)
        elif text:
            said.append(text)
    return said
