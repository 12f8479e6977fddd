"""Models that were traced before: their facts from a file, for the training they were traced for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from galvatron.core.errors import InvalidInput
from galvatron.core.files.models import MARK, model_of_content
from galvatron.core.files.reader import read_text
from galvatron.core.spec.model import Attention, ModelSpec, Training

__all__ = ["read_traced", "traced_of_text"]


def read_traced(path: Path, training: Training) -> ModelSpec | None:
    """The traced model in a file; None: it is another file. Raises :class:`InvalidInput` if it is to be trained in
    another way than it was traced for."""
    return traced_of_text(
        read_text(path, "a Hugging Face configuration or a traced model in JSON"), str(path), training
    )


def traced_of_text(text: str, file: str, training: Training) -> ModelSpec | None:
    """The traced model in the text of a file, whose name is for errors; None and errors as above."""
    if f'"{MARK}"' not in text[:200]:
        return None
    model = model_of_content(text, file)
    was = model.training
    for name, asked, traced in (
        ("precision", training.precision, was.precision),
        ("attention", training.attention, was.attention),
        ("dropout", training.dropout, was.dropout),
        ("sequence_length", training.sequence_length, was.sequence_length),
        ("image_size", training.image_size, was.image_size),
    ):
        # A model without fused attention was traced without it, whatever was asked for.
        if asked is not None and asked != traced and asked is not Attention.FUSED:
            raise InvalidInput(
                f"{file}: was traced for {name} {traced}, but {asked} is asked for; trace it again "
                "(galvatron models MODEL --output) or leave that out"
            )
    return replace(model, training=replace(was, optimizer=training.optimizer))
