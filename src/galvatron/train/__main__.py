"""A rank of ``galvatron train``, as the launcher starts it: ``python -m galvatron.train FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from galvatron.processes.environment import LAUNCHER, quiet
from galvatron.processes.parents import end_with_parent


def main() -> None:
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is not None:
        end_with_parent(int(launcher))  # before anything is imported that takes long
    quiet()  # before anything is imported that has something to say
    from galvatron.train.worker import train_rank

    train_rank(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
