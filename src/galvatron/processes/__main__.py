"""The helper process that starts the ranks: a job on standard input, its result into the file it is given."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from galvatron.processes.environment import quiet
from galvatron.processes.ranks import run_all


def main() -> None:
    quiet()
    run_all(pickle.load(sys.stdin.buffer), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
