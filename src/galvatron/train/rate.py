"""The learning rate as a function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from galvatron.train.settings import Decay, Settings

__all__ = ["learning_rate"]


def learning_rate(step: int, settings: Settings) -> float:
    """Of the step with this number, from 1: linear warm-up, then decay to the final share at the last step."""
    highest, warmup = settings.learning_rate, settings.warmup_steps
    if step <= warmup:
        return highest * step / warmup
    done = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    if settings.decay is Decay.CONSTANT:
        left = 1.0
    elif settings.decay is Decay.LINEAR:
        left = 1 - done
    else:
        left = (1 + math.cos(math.pi * done)) / 2
    return highest * (settings.final_rate + (1 - settings.final_rate) * left)
