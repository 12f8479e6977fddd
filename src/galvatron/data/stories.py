"""Endless small stories in English: text that is on every machine, and that even a tiny model can learn much of.

Who does what with how many things is drawn at random, but names come again, sums are right and sentences follow a
grammar. A model that knows only how frequent each word is has far to fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

__all__ = ["stories"]

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
