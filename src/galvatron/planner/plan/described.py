"""What cannot be asked of a model that was described before: its figures were counted for one way of training."""

from __future__ import annotations

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ModelSpec, Training
from galvatron.planner.plan.options import Setup

__all__ = ["reject_other_training", "reject_tuning", "reject_uncompiled"]


def reject_tuning(asked: Training, model: ModelSpec) -> None:
    """Figures have no names of parameters: what is frozen is part of them."""
    given = model.training
    adapted = asked.lora is None or asked.lora.asks_for(given.lora)
    patterns = asked.freeze, asked.train_only
    if asked.tunes and not (adapted and patterns == (given.freeze, given.train_only)):
        raise InvalidInput(
            f"{'lora' if asked.lora else 'freeze'}: asked for, but {model.name!r} is given by its figures, of which "
            "other parameters are frozen or none; give the model's name, folder or configuration"
        )


def reject_other_training(setup: Setup, model: ModelSpec) -> None:
    """Figures were counted for one way of training; another that is asked for would be ignored."""
    for name in ("precision", "attention", "dropout", "sequence_length"):
        asked, given = setup.get(name), getattr(model.training, name)
        if asked is not None and asked != given:
            raise InvalidInput(
                f"{name.replace('_', '-')}: {asked} given, but {model.name!r} was described for {given}; describe it "
                "for that, or leave it out"
            )


def reject_uncompiled(setup: Setup, model: ModelSpec) -> None:
    """Blocks that run operation by operation need more memory than was counted for compiled ones."""
    if model.training.compile and setup.get("compile") is False:
        raise InvalidInput(
            f"compile: off, but {model.name!r} was described for compiled blocks, which save less for backward; "
            "describe it without compile, or leave that out"
        )
