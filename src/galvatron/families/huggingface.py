"""Models from a Hugging Face ``config.json``, without importing transformers.

Such a file leaves out what equals its class's default, so every field but ``model_type`` has one here too (those of
transformers 5). The heads are those of pre-training: masked or causal language modelling, image classification.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import naming, read_text
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.discovery import families, family_of
from galvatron.families.fields import Fields

__all__ = ["UnknownArchitecture", "content_of_text", "model_of_config", "read_content", "read_huggingface"]


class UnknownArchitecture(InvalidInput):
    """A configuration of Hugging Face's that no family counts: its facts can only be traced."""

    def __init__(self, message: str, content: dict[str, Any], name: str) -> None:
        super().__init__(message)
        self.content, self.name = content, name


def read_huggingface(path: Path, name: str, training: Training) -> ModelSpec:
    """Read a ``config.json``, or the one in a folder. The model keeps all of the file, known fields and others."""
    return model_of_config(read_content(path), path / "config.json" if path.is_dir() else path, name, training)


def read_content(path: Path) -> dict[str, Any]:
    """The content of a ``config.json``, or of the one in a folder, of whatever architecture."""
    if path.is_dir():
        path = path / "config.json"
    return content_of_text(read_text(path, "a Hugging Face configuration in JSON"), str(path))


def content_of_text(text: str, file: str) -> dict[str, Any]:
    """The content of such a file, from its text; ``file`` is its name in errors."""
    try:
        content = json.loads(text)  # NaN passes, so that the error names the field that holds it
    except ValueError as error:
        raise InvalidInput(f"{file}: is not JSON ({error}); expected a Hugging Face configuration") from None
    except RecursionError:
        raise InvalidInput(f"{file}: is nested too deep to be read; expected a Hugging Face configuration") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"{file}: holds a {type(content).__name__}; expected an object with a field model_type")
    return content


def model_of_config(content: dict[str, Any], path: Path, name: str, training: Training) -> ModelSpec:
    """The model that a configuration describes; ``path`` says where it came from, for errors."""
    fields = Fields(path, content)
    model_type = fields.text("model_type")
    family = family_of(model_type)
    if family is None:
        types = [known.model_type for known in families().values()]
        close = difflib.get_close_matches(model_type, types, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "describe other models layer by layer in a .toml file"
        error = fields.error("model_type", model_type, f"one of {', '.join(types)}; {hint}")
        raise UnknownArchitecture(str(error), content, name)
    named = _named_class(content)
    if named is not None and named != family.head_class:
        error = fields.error("architectures", named, f"{family.head_class}, or no class")
        raise UnknownArchitecture(str(error), content, name)
    architecture = family.read(fields)
    with naming(str(path)):
        model = architecture.spec(name, training)
    try:
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise InvalidInput(
            f"{path}: cannot be part of a plan ({error}); expected numbers that are finite and text that is Unicode"
        ) from None
    return replace(model, config=content)


def _named_class(content: dict[str, Any]) -> str | None:
    """The class with another head than that of pre-training (for classification, say) that a configuration names."""
    named = content.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    # Those of a base model, and of all heads of pre-training at once, are trained with the family's own head.
    return first if isinstance(first, str) and "For" in first and not first.endswith("ForPreTraining") else None
