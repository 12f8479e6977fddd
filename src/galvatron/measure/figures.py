"""From repeated timings to figures: medians, their spread, and straight lines through them. Plain arithmetic."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "NOISY",
    "QUIET",
    "Block",
    "Line",
    "Quality",
    "Reading",
    "fit_line",
    "quality_in",
    "quality_of",
    "reading_of",
]

NOISY = 0.25
"""Spread from which on people should be warned."""
QUIET = 0.1
"""Part of the machine that others may take while a block still counts as undisturbed."""
_FEWEST = 3
"""Blocks a median is taken of, the least disturbed ones if need be."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some calls, timed together."""

    seconds: tuple[float, ...]
    """Of one call, part by part, without the time that others took."""
    disturbed: float = 0.0
    """Part of the machine that other people's processes took meanwhile."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One quantity, from several blocks."""

    seconds: float
    """The median."""
    spread: float
    """Distance between the quartiles, over the median."""
    repeatability: float
    """Difference between what every other block and what the rest say, over the median: two passes, interleaved."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How far a profile's figures can be trusted: medians over all its quantities."""

    rounds: int
    spread: float
    repeatability: float

    def __str__(self) -> str:
        return (
            f"medians of {self.rounds} rounds, typical spread {self.spread:.0%}, even and odd rounds differ by "
            f"{self.repeatability:.0%}"
        )


_QUALITY = re.compile(r"medians of (\d+) rounds, typical spread (\d+)%, even and odd rounds differ by (\d+)%")


def quality_in(text: str) -> Quality | None:
    """What a line that ends with a quality says, to whole percents."""
    found = _QUALITY.search(text)
    return None if found is None else Quality(int(found[1]), int(found[2]) / 100, int(found[3]) / 100)


@dataclass(frozen=True, slots=True)
class Line:
    """fixed + slope · x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x


def reading_of(blocks: Sequence[Block], part: int = 0) -> Reading:
    """What the undisturbed blocks say, or where these are few the least disturbed ones."""
    ranked = sorted(blocks, key=lambda block: block.disturbed)
    limit = max(QUIET, ranked[min(_FEWEST, len(ranked)) - 1].disturbed)
    seconds = [block.seconds[part] for block in blocks if block.disturbed <= limit]
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
    halves = [statistics.median(half) for half in (seconds[::2], seconds[1::2]) if half]
    return Reading(median, (high - low) / median, (max(halves) - min(halves)) / median)


def quality_of(readings: Iterable[Reading], rounds: int) -> Quality:
    """How well figures repeat, from blocks of runs."""
    known = list(readings)
    return Quality(
        rounds,
        statistics.median(reading.spread for reading in known),
        statistics.median(reading.repeatability for reading in known),
    )


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least relative errors, neither part negative.

    Relative, because a figure for small messages matters as much as one for large ones a thousand times as slow.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = 0.0
    if spread > 0:
        slope = sum(w * (x - mean_x) * y for w, (x, y) in zip(weights, points, strict=True)) / spread
    if slope <= 0:
        return Line(mean_y, 0.0)
    fixed = mean_y - slope * mean_x
    if fixed >= 0:
        return Line(fixed, slope)
    squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return Line(0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares)
