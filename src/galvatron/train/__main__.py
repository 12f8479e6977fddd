"""A rank of ``galvatron train``, as the launcher starts it: ``python -m galvatron.train FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from galvatron.train.worker import train_rank

if __name__ == "__main__":
    train_rank(Path(sys.argv[1]))
