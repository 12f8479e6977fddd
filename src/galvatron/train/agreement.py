"""Whether what is said beside a plan that is made already agrees with it. No torch: the launcher asks."""

from __future__ import annotations

import logging
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention
from galvatron.core.units import format_bytes, parse_bytes
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.setup import BEST, training_of

__all__ = ["check_said"]

_LOG = logging.getLogger(__name__)
_OF_TRAINING = (
    "precision", "attention", "dropout", "sequence_length", "image_size", "optimizer", "compile", "float8",
)  # fmt: skip
_COMPARED = ("batch", "schedule", "memory", *_OF_TRAINING)
_TUNING = ("freeze", "train_only", "lora", "lora_alpha", "lora_targets", "lora_full")
_DEFAULTS = {"space": "full", "paper": False}


def check_said(setup: Setup, plan: Plan, *, cluster: str | None = None) -> None:
    """Refuse what the plan has otherwise, and say what only planning would have read.

    A plan has room for one batch, one optimizer and for what trains; another would need more memory, or a plan that
    uses what is left.
    """
    said: dict[str, Any] = {
        name: value for name, value in setup.items() if value is not None and value != _DEFAULTS.get(name)
    }
    if said.get("batch") == BEST:
        del said["batch"]  # whichever it was
    if plan.model.training.attention is Attention.PAPER:
        said.pop("attention", None)  # which is eager attention, as the paper counts it
    for name in (name for name in _COMPARED if name in said):
        _compare(name, said[name], _planned(name, plan))
    _check_tuning(setup, plan)
    unread = sorted(name.replace("_", "-") for name in said.keys() - {*_COMPARED, *_TUNING})
    unread += [] if cluster is None else ["cluster"]
    if unread:
        _LOG.warning(
            "--%s: not read, because the plan is made already; plan anew with 'galvatron plan', or give the model "
            "instead of the plan", ", --".join(unread),
        )  # fmt: skip


def _planned(name: str, plan: Plan) -> Any:
    if name == "batch":
        return plan.batch
    if name == "schedule":
        return plan.schedule
    if name == "memory":
        return plan.memory_budget_bytes
    return getattr(plan.model.training, name)


def _compare(name: str, said: Any, planned: Any) -> None:
    if name == "memory":
        said = parse_bytes(said, where=name)
    if name == "batch" and isinstance(said, str) and said.isdecimal():
        said = int(said)
    if said == planned or (name == "dropout" and planned is None and said):
        return
    option = name.replace("_", "-")
    if isinstance(said, bool):
        given, was = f"--{'' if said else 'no-'}{option} given", "without" if said else "with it"
        raise InvalidInput(f"{given}, but the plan was made {was}; plan anew, or leave it out")
    shown = [format_bytes(each) if name == "memory" else str(each) for each in (said, planned)]
    made = "none" if planned is None else shown[1]
    raise InvalidInput(f"{option}: {shown[0]} given, but the plan is for {made}; plan anew for that, or leave it out")


def _check_tuning(setup: Setup, plan: Plan) -> None:
    asked, training = training_of(setup), plan.model.training
    if asked.lora is not None and not asked.lora.asks_for(training.lora):
        raise InvalidInput("lora: the plan was made for other adapters, or for none; plan anew")
    for name in ("freeze", "train_only"):
        patterns, frozen = getattr(asked, name), getattr(training, name)
        if patterns and patterns != frozen:
            raise InvalidInput(
                f"{name.replace('_', '-')}: {', '.join(patterns)} given, but the plan was made with "
                f"{', '.join(frozen) or 'none'}; plan anew"
            )
