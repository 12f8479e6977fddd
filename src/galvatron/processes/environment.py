"""What a process that trains finds set: environment variables, Python's garbage collector."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Mapping

__all__ = ["LAUNCHER", "defaults_if_unset", "quiet", "settle"]

LAUNCHER = "GALVATRON_LAUNCHER"
"""In the environment of ranks: the number of the process that started them."""

_KEEP_MEMORY = {"MIMALLOC_PURGE_DELAY": "-1"}
"""Torch's allocator on ARM processors gives freed memory back to the system after some milliseconds, and the next
iteration gets it anew, page by page: a tenth slower."""


def defaults_if_unset(**more: str) -> Mapping[str, str]:
    """The settings for ranks, and these besides, that the user has not made."""
    return {name: value for name, value in (_KEEP_MEMORY | more).items() if name not in os.environ}


def quiet() -> None:
    """Let libraries not say what no user could mend: torchao, which transformers imports where it is installed."""
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)


def settle() -> None:
    """Call it when all that lasts has been made (imports, model): from then on the collector looks at what came later.

    Else it goes through everything again and again, each rank at another moment, and while one of them does, all
    others wait for it. What lasts is never collected any more, so it is for processes with one model.
    """
    gc.collect()
    gc.freeze()
