"""Chat and instruction data: which tokens of a conversation are answers, the only ones that a model learns from.

Each row has ``messages`` (objects with ``role`` and ``content``), written by the tokenizer's own chat template, or
``prompt`` and ``completion``. What cannot be told for certain is refused with the line's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.train.data.examples import Document
from galvatron.train.data.rows import Rows, rows_in

__all__ = ["Chat", "chat_in"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWERS = "assistant"


@dataclass(frozen=True)
class Chat:
    """Conversations in files."""

    rows: Rows
    fields: tuple[str, ...]
    """``messages``, or ``prompt`` and ``completion``."""

    @property
    def name(self) -> str:
        return self.rows.name

    @property
    def key(self) -> str:
        return self.rows.key

    def documents(self, tokenizer: Any) -> Iterator[Document]:
        """Each row's tokens; ``tokenizer``: one of transformers."""
        for row in self.rows:
            given = row.fields
            missing = [name for name in self.fields if name not in given]
            if missing:
                raise InvalidInput(f"{row.where}: the field {missing[0]!r} is missing, which the first line has")
            if self.fields == ("messages",):
                yield _conversation(given["messages"], tokenizer, row.where)
            else:
                yield _completion(given["prompt"], given["completion"], tokenizer, row.where)


def chat_in(path: Path) -> Chat | None:
    """The conversations of a file or folder, if its first row has some; None: it is text."""
    rows = rows_in(path)
    first = None if rows is None else next(iter(rows), None)
    if rows is None or first is None:
        return None
    if "messages" in first.fields:
        return Chat(rows, ("messages",))
    return Chat(rows, ("prompt", "completion")) if {"prompt", "completion"} <= first.fields.keys() else None


def _completion(prompt: Any, completion: Any, tokenizer: Any, where: str) -> Document:
    """The prompt, the completion and the token that ends it; the latter two count."""
    for name, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise InvalidInput(
                f"{where}: {name} is a {type(text).__name__}; expected text (conversations are for the field messages)"
            )
    asked, answered = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion))
    if tokenizer.eos_token_id is None:
        raise InvalidInput("tokenizer: it has no token that ends a text, so no model could learn to end its answer")
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [*start, *asked, *answered, tokenizer.eos_token_id]
    counted = np.arange(len(ids)) >= len(start) + len(asked)
    return Document(np.array(ids, np.int64), counted)


def _conversation(messages: Any, tokenizer: Any, where: str) -> Document:
    if not isinstance(messages, list) or not all(isinstance(own, dict) and "role" in own for own in messages):
        raise InvalidInput(f"{where}: messages are no list of objects with a role; expected role and content in each")
    if not any(own["role"] == _ANSWERS for own in messages):
        raise InvalidInput(
            f"{where}: no message is of the {_ANSWERS}, so there is nothing to learn; leave the line out"
        )
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise InvalidInput(
            "tokenizer: it has no chat template, by which conversations are written; give the tokenizer of a chat "
            "model, or prompt and completion instead of messages"
        )
    if _GENERATION.search(template):
        made = _written(tokenizer, messages, where, return_dict=True, return_assistant_tokens_mask=True)
        ids, counted = made["input_ids"], np.array(made["assistant_masks"], bool)
    else:
        ids = _ids(tokenizer, messages, where)
        counted = _answers(messages, ids, tokenizer, where)
    if not counted.any():
        raise InvalidInput(f"{where}: the chat template marks no token of an answer; mend the template or the line")
    return Document(np.array(ids, np.int64), counted)


def _answers(messages: list[Any], ids: list[int], tokenizer: Any, where: str) -> Any:
    """What each answer adds to the conversation before it, where the template says it asks for an answer."""
    counted = np.zeros(len(ids), bool)
    for place, message in enumerate(messages):
        if message["role"] != _ANSWERS:
            continue
        before = _ids(tokenizer, messages[:place], where, add_generation_prompt=True)
        after = _ids(tokenizer, messages[: place + 1], where)
        if ids[: len(after)] != after or after[: len(before)] != before or len(after) == len(before):
            raise InvalidInput(
                f"{where}: message {place + 1} cannot be found in the conversation, because the chat template writes "
                "what is before it differently once it goes on; mark answers in the template with {% generation %} … "
                "{% endgeneration %}"
            )
        counted[len(before) : len(after)] = True
    return counted


def _ids(tokenizer: Any, messages: list[Any], where: str, **options: Any) -> list[int]:
    made = _written(tokenizer, messages, where, return_dict=True, **options)
    ids: list[int] = list(made["input_ids"])
    return ids


def _written(tokenizer: Any, messages: list[Any], where: str, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, **options)
    except Exception as error:  # of whatever kind: templates raise their own
        raise InvalidInput(
            f"{where}: the tokenizer's chat template does not take it ({type(error).__name__}: {error})"
        ) from None
