"""Python's garbage collector in the processes that train and measure."""

from __future__ import annotations

import gc

__all__ = ["settle"]


def settle() -> None:
    """Call it when all that lasts has been made (imports, model): from then on the collector looks at what came later.

    Else it goes through everything again and again, each rank at another moment, and while one of them does, all
    others wait for it. What lasts is never collected any more, so it is for processes with one model.
    """
    gc.collect()
    gc.freeze()
