"""What the processes that train should find in their environment, unless the user has set it. No torch: it reads these
as it is loaded, so whoever starts the processes sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["unset"]

_KEEP_MEMORY = {"MIMALLOC_PURGE_DELAY": "-1"}
"""Torch's allocator on ARM processors gives freed memory back to the system after some milliseconds, and the next
iteration gets it anew, page by page: a tenth slower."""


def unset(**more: str) -> Mapping[str, str]:
    """The settings for ranks, and these besides, that the user has not made."""
    return {name: value for name, value in (_KEEP_MEMORY | more).items() if name not in os.environ}
