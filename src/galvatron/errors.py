"""Every error Galvatron raises on purpose, in one tree.

    GalvatronError
    ├── InvalidInput      what the user gave cannot be right (exit status 2)
    │   └── PlanMismatch  a plan file made for another model, cluster or version
    └── Infeasible        nothing in the space fits the budget (exit status 3)

A message says what was given, what was expected and what to do; the command line prints it without a traceback.
"""

from __future__ import annotations

__all__ = ["GalvatronError", "Infeasible", "InvalidInput", "PlanMismatch"]


class GalvatronError(Exception):
    """Base of all errors meant for users."""

    exit_status = 1


class InvalidInput(GalvatronError):
    """The input is wrong; the message names where, the value, and what would be right."""

    exit_status = 2


class PlanMismatch(InvalidInput):
    """A plan that was made for something else than what it is used with."""


class Infeasible(GalvatronError):
    """No plan in the space fits; ``advice`` lists what would."""

    exit_status = 3

    def __init__(self, message: str, *, advice: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.advice = advice

    def __str__(self) -> str:
        return "\n".join([str(self.args[0]), *(f"  - {line}" for line in self.advice)])
