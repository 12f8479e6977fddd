"""What one rank finds wrong, all ranks raise: a rank that goes on alone would wait for the others for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from galvatron.core import errors
from galvatron.core.errors import GalvatronError, RankFailure

__all__ = ["from_first", "together"]

_Result = TypeVar("_Result")


def together(group: ProcessGroup | None, check: Callable[[], None]) -> None:
    """Run a check on every rank; what the first rank that fails raises, all raise."""
    mine: Exception | None = None
    try:
        check()
    except Exception as error:
        mine = error
    said: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, None if mine is None else (type(mine).__name__, str(mine)), group=group)
    for rank, failure in enumerate(said):
        if failure is not None:
            raise _as_said(rank, *failure) from mine


def from_first(group: ProcessGroup | None, read: Callable[[], _Result]) -> _Result:
    """What rank 0 finds, or its error, on every rank: ranks that look for themselves may see different files."""
    found: list[Any] = [None, None]
    failed: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            found[0] = read()
        except Exception as error:
            failed = error
            found[1] = type(error).__name__, str(error)
    dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise _as_said(0, *found[1]) from failed
    result: _Result = found[0]
    return result


def _as_said(rank: int, kind: str, message: str) -> GalvatronError:
    """Another rank's error. Only errors meant for users have a class that all ranks know how to make."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, GalvatronError):
        return known(message)
    return RankFailure(f"rank {rank} failed: {kind}: {message}")
