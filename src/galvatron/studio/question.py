"""What a page asks: a model, a cluster and a setup, checked, as a request to the planner.

A page names presets or sends the text of a file. Nothing that it says is ever used as a path.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.files.clusters import cluster_of_text, is_preset
from galvatron.core.files.reader import parse, shown, validate
from galvatron.core.spec import SWITCHES, Cluster, ModelSpec, Training
from galvatron.families import load_cluster
from galvatron.families.huggingface import content_of_text
from galvatron.families.presets import find_preset
from galvatron.measure.models import load_any_model, model_of_text
from galvatron.planner.plan.options import Setup, checked_setup
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import Source, request_for

__all__ = ["SETUP", "Question", "Thing", "question_of"]

SETUP = (
    "devices", "node_link", "memory", "batch", "sequence_length", "precision", "optimizer", "space", "schedule",
    "pipeline", "max_micro_batch", "pin", "forbid", "lora", *(switch.name for switch in SWITCHES),
)  # fmt: skip
"""What a page may say about a plan; the rest of a setup names files, or is for the paper."""
_PLACES = ("_name_or_path", "auto_map")
"""Fields of a configuration that name where it came from: of no use here, and left out."""
_WORDS = ("id2label", "label2id")
"""Fields that hold words of people, whatever is in them."""
_NO_PATH = re.compile(r"(?![.~])[^/\\\x00]*")
_FILE = re.compile(r"[^/\\\x00]{1,100}\.(?:json|toml)")
_Text = Annotated[str, Field(max_length=1_000_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Thing(_Strict):
    """A model or a cluster: a preset by its name, or the text of a file."""

    name: Annotated[str, Field(max_length=100)] | None = None
    file: Annotated[str, Field(max_length=100)] | None = None
    text: _Text | None = None

    @model_validator(mode="after")
    def _one(self) -> Thing:
        if (self.name is None) == (self.text is None) or (self.file is None) != (self.text is None):
            raise ValueError("the name of a preset, or the name of a file and its text")
        if self.file is not None and not _FILE.fullmatch(self.file):
            raise ValueError("the name of a .json or .toml file, without folders")
        return self


class _Asked(_Strict):
    model: Thing
    cluster: Thing
    setup: dict[str, Any] = {}
    tokens: Annotated[float, Field(gt=0, le=1e20)] | None = None
    price: Annotated[float, Field(ge=0, le=1e9)] | None = None


@dataclass(frozen=True)
class Question:
    """A question that can be asked; whether it has an answer is for the planner to say."""

    model: Thing
    cluster: Thing
    setup: Setup
    tokens: float | None
    price: float | None

    @cached_property
    def request(self) -> Request:
        """The request that is meant. Raises :class:`InvalidInput` where there is none."""
        cluster, setup = _cluster(self.cluster, self.setup), self.setup
        if self.cluster.text is None:  # a preset has as many devices already
            setup = cast("Setup", {name: value for name, value in setup.items() if name != "devices"})
        if self.model.text is None:
            return request_for(_preset(str(self.model.name)), cluster, setup, load_any_model)
        return request_for("", cluster, setup, self._uploaded)

    def _uploaded(self, _: Source, training: Training) -> ModelSpec:
        text, file = str(self.model.text), str(self.model.file)
        try:
            if file.endswith(".json"):
                text = json.dumps(_without_paths(content_of_text(text, file), file))
            return model_of_text(text, file, training)
        except GalvatronError:
            raise
        except Exception as error:  # transformers builds what is in the file, and fails in its own ways
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InvalidInput(f"{file}: no model can be built of it ({reason}); upload another file") from error

    def to_dict(self) -> dict[str, Any]:
        """The question as a page says it."""
        return {
            "model": self.model.model_dump(exclude_none=True),
            "cluster": self.cluster.model_dump(exclude_none=True),
            "setup": dict(self.setup),
            "tokens": self.tokens,
            "price": self.price,
        }

    def changed(self, *, cluster: Thing | None = None, **setup: Any) -> Question:
        """The same question but for the cluster, or for parts of the setup."""
        merged = cast("Setup", {**self.setup, **setup})
        return replace(self, cluster=cluster or self.cluster, setup=merged)


def question_of(text: str) -> Question:
    """The question in a request's body. Raises :class:`InvalidInput` for what is none."""
    asked = validate(_Asked, parse(text, "question", "JSON"), "question")
    other = next((name for name in asked.setup if name not in SETUP), None)
    if other is not None:
        raise InvalidInput(f"question: setup.{other} cannot be asked here; expected some of {', '.join(SETUP)}")
    said = {name: value for name, value in asked.setup.items() if value is not None}
    return Question(asked.model, asked.cluster, checked_setup(cast("Setup", said)), asked.tokens, asked.price)


def _preset(name: str) -> str:
    if find_preset(name) is None:
        raise InvalidInput(f"model: {shown(name)} is no preset; choose one of the list, or upload a file")
    return name


def _cluster(thing: Thing, setup: Setup) -> Cluster:
    if thing.text is not None:
        if not str(thing.file).endswith(".toml"):
            raise InvalidInput(f"cluster: {shown(thing.file)} given; expected a cluster in a .toml file")
        return cluster_of_text(thing.text, str(thing.file))
    if not is_preset(str(thing.name)):
        raise InvalidInput(f"cluster: {shown(thing.name)} is no preset; choose one of the list, or upload a file")
    return load_cluster(str(thing.name), devices=setup.get("devices"))


def _without_paths(content: Any, where: str) -> Any:
    """A configuration in which no text can be a path: transformers reads files and folders that some fields name."""
    if isinstance(content, dict):
        return {
            key: value if key in _WORDS else _without_paths(value, f"{where}: {key}")
            for key, value in content.items()
            if key not in _PLACES
        }
    if isinstance(content, list):
        return [_without_paths(value, where) for value in content]
    if isinstance(content, str) and not _NO_PATH.fullmatch(content):
        raise InvalidInput(
            f"{where} is {shown(content)}, which could be a path; leave it out here, or plan on the command line"
        )
    return content
