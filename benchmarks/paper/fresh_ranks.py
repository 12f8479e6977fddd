"""Fresh ranks for each run: on virtual GPUs, or CPU processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from fork_server import ForkServer, Outcome
from galvatron.processes.virtual import virtual_gpus
from rank_job import MeasureJob, prepare

__all__ = ["FreshRanks"]


class FreshRanks:
    """Runs jobs one after the other, each in processes of its own."""

    def __init__(self, devices: int, *, gpu: bool) -> None:
        self._devices, self._gpu = devices, gpu
        self._stack, self._server = ExitStack(), ExitStack()
        self._served = False

    def __enter__(self) -> FreshRanks:
        self._zygote = self._stack.enter_context(ForkServer(prepare))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._stack.close()

    def run(self, job: MeasureJob, limit_s: float) -> Outcome:
        """``limit_s``: after which it has failed."""
        if not self._served:
            self._server.close()
            self._server.enter_context(virtual_gpus(self._devices if self._gpu else None))
        outcome = self._zygote.run(job, self._devices, self._environment(), limit_s)
        self._served = outcome.status == "ok"  # ranks killed at work may have left the GPU's server in a bad state
        return outcome

    def _environment(self) -> Mapping[str, str]:
        if not self._gpu:
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "GALVATRON_"))}
