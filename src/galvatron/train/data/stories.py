"""Stories made up by rules: text to try training with, and what knowing the frequencies of words is worth."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import torch

from galvatron.families.layer import IGNORED
from galvatron.train.data.dataset import Dataset
from galvatron.train.data.order import generator_of, shuffled

__all__ = ["stories", "unigram_entropy"]


def unigram_entropy(dataset: Dataset, *, most: int = 2048) -> float:
    """Entropy of the targets' frequencies in nats, over up to ``most`` samples from all over the data set.

    The loss of a model that has learned the frequencies and nothing else: below it, a model has learned more.
    """
    size = min(most, len(dataset))
    counts = torch.zeros(0, dtype=torch.long)
    for index in shuffled(np.arange(size), len(dataset), 0).tolist():
        labels = dataset.sample(index, generator_of(0, index), frozenset({"pixel_values"}))["labels"].flatten()
        found = torch.bincount(labels[labels != IGNORED], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log()).sum())


_NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Klara", "Leo")
_PRONOUNS = ("she", "he")
"""Names alternate."""
_THINGS = ("apple", "book", "button", "candle", "coin", "egg", "feather", "key", "pear", "ribbon", "shell", "stone")
_PLACES = ("garden", "kitchen", "library", "market", "harbour", "forest", "station", "workshop")
_WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "foggy")
_FOUND = ("found", "bought", "picked up", "was given")
_LOST = ("lost", "sold", "gave away", "broke")
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six",
    "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_LARGEST = 10
"""Of a summand."""


def stories(count: int, seed: int = 0) -> Iterator[str]:
    """So many stories, each a paragraph of about 300 characters; the same for the same seed."""
    random = Random(seed)

    def draw(number: int) -> int:
        return int(random.random() * number)  # unlike randrange, promised never to change

    def pick(words: tuple[str, ...]) -> str:
        return words[draw(len(words))]

    for _ in range(count):
        who = draw(len(_NAMES))
        name, pronoun = _NAMES[who], _PRONOUNS[who % 2]
        friend = _NAMES[(who + 1 + draw(len(_NAMES) - 1)) % len(_NAMES)]
        thing, place = pick(_THINGS), pick(_PLACES)
        has, found = 1 + draw(_LARGEST), 1 + draw(_LARGEST)
        lost = 1 + draw(has + found)
        total, left = has + found, has + found - lost
        yield (
            f"It was a {pick(_WEATHER)} day, and {name} went to the {place} with {friend}. "
            f"{name} had {_many(has, thing)}. In the {place} {pronoun} {pick(_FOUND)} {_many(found, thing)}. "
            f"{_NUMBERS[has].capitalize()} plus {_NUMBERS[found]} is {_NUMBERS[total]}, so {name} had "
            f"{_many(total, thing)}. On the way home {pronoun} {pick(_LOST)} {_many(lost, thing)}. "
            f"{_NUMBERS[total].capitalize()} minus {_NUMBERS[lost]} is {_NUMBERS[left]}, so {pronoun} told {friend}: "
            f'"I have {_many(left, thing)} left."'
        )


def _many(number: int, thing: str) -> str:
    return f"{_NUMBERS[number]} {thing}{'' if number == 1 else 's'}"
