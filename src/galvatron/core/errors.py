"""Every error Galvatron raises on purpose, in one tree.

    GalvatronError
    ├── InvalidInput      what the user gave cannot be right (exit status 2)
    │   ├── PlanMismatch  a plan file made for another model, cluster or version
    │   └── OutOfRange    a figure that nothing real has
    ├── Infeasible        nothing in the space fits the budget (exit status 3)
    ├── CheckpointCorrupt a saved state that is damaged or incomplete (exit status 4)
    ├── NonFinite         training met a loss or gradient that is no number (exit status 5)
    ├── RankFailure       a process of the job died or hangs (exit status 6)
    ├── OutOfMemory       a device's memory did not suffice (exit status 7)
    ├── SaveFailed        a checkpoint could not be written; earlier ones are as they were (exit status 8)
    └── Unequal           what must be equal is not: a plan and the stock model, or replicas (exit status 9)

A message says what was given, what was expected and what to do; the command line prints it without a traceback.
"""

from __future__ import annotations

__all__ = [
    "CheckpointCorrupt",
    "GalvatronError",
    "Infeasible",
    "InvalidInput",
    "NonFinite",
    "OutOfMemory",
    "OutOfRange",
    "PlanMismatch",
    "RankFailure",
    "SaveFailed",
    "Unequal",
]


class GalvatronError(Exception):
    """Base of all errors meant for users."""

    exit_status = 1


class InvalidInput(GalvatronError):
    """The input is wrong; the message names where, the value, and what would be right."""

    exit_status = 2


class PlanMismatch(InvalidInput):
    """A plan that was made for something else than what it is used with."""


class OutOfRange(InvalidInput, ValueError):
    """A figure that nothing real has. To a ValueError pydantic adds where in a file it is."""


class Infeasible(GalvatronError):
    """No plan in the space fits; ``advice`` lists what would."""

    exit_status = 3

    def __init__(self, message: str, *, advice: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.advice = advice

    def __str__(self) -> str:
        return "\n".join([str(self.args[0]), *(f"  - {line}" for line in self.advice)])


class CheckpointCorrupt(GalvatronError):
    """A saved state that cannot be trusted; the message names the file and what to load instead."""

    exit_status = 4


class NonFinite(GalvatronError):
    """The loss or the gradient is no finite number; no weight was touched at that step."""

    exit_status = 5


class RankFailure(GalvatronError):
    """A process of the job died or does not answer; the message names rank, stage and step."""

    exit_status = 6


class OutOfMemory(GalvatronError):
    """A device ran out of memory; the message says what was predicted and what was in use, by stage."""

    exit_status = 7


class SaveFailed(GalvatronError):
    """A checkpoint could not be written; the message names the rank, the file and the cause."""

    exit_status = 8


class Unequal(GalvatronError):
    """A plan does not train as the stock model does, or ranks that must hold the same hold something else."""

    exit_status = 9
