"""A rank of ``galvatron train``, as the launcher starts it: ``python -m galvatron.train FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from galvatron.processes.environment import quiet


def main() -> None:
    quiet()  # before anything is imported that has something to say
    from galvatron.train.worker import train_rank

    train_rank(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
