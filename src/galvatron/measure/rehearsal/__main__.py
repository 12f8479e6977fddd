"""The process that rehearses one rank: a job on standard input, what was measured into the file it is given."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from galvatron.core.errors import GalvatronError
from galvatron.measure.rehearsal.processes import Job
from galvatron.measure.rehearsal.rehearse import rehearse_rank
from galvatron.measure.rehearsal.results import Measured
from galvatron.processes.world import let_segments_grow


def main() -> None:
    job = pickle.load(sys.stdin.buffer)
    assert isinstance(job, Job)
    result: Measured | GalvatronError
    try:
        if job.device == "cuda":
            let_segments_grow()  # as ranks do
        result = rehearse_rank(job.plan, job.rank, device=torch.device(job.device), steps=job.steps)
    except GalvatronError as error:
        result = error
    Path(sys.argv[1]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
