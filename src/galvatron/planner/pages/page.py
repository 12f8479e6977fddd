"""One HTML file of text, tables and charts: everything it needs is inside, and it asks no network for anything.

Charts are Observable Plot's, whose files are embedded. What a user's file names (models, clusters, layers) is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput

__all__ = ["Card", "Page", "Section", "chart", "paragraph", "table"]

_CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
"""A page cannot load or send anything, whatever is written in it."""


@dataclass(frozen=True, slots=True)
class Card:
    """A figure to see at once."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it, as HTML."""

    title: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a page says; ``facts`` has the numbers of each chart, by the name of its place."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    facts: dict[str, Any] = field(default_factory=dict)

    def html(self) -> str:
        """The whole file."""
        cards = "".join(
            f'<div class="card"><span class="soft">{escape(card.label)}</span><b>{escape(card.value)}</b>'
            f'<span class="soft">{escape(card.note)}</span></div>'
            for card in self.cards
        )
        sections = "".join(
            f"<section><h2>{escape(section.title)}</h2>{section.content}</section>" for section in self.sections
        )
        # In a script nothing is escaped, so the text must not end it: JSON has other ways to write these characters.
        facts = json.dumps(self.facts, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
        scripts = "".join(f"<script>{_asset(name)}</script>" for name in ("d3.min.js", "plot.min.js", "page.js"))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_asset('page.css')}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="soft">{escape(self.subtitle)}</p>'
            f'<div class="cards">{cards}</div>{sections}</main>'
            f'<script type="application/json" id="facts">{facts}</script>{scripts}</body></html>\n'
        )

    def save(self, path: str | Path) -> None:
        """Write the file."""
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write a page to {str(path)!r}: {error.strerror or error}") from error


def chart(name: str) -> str:
    """A place for the chart of this name."""
    return f'<div class="chart" id="{escape(name)}"></div>'


def paragraph(text: str) -> str:
    """Words below a heading."""
    return f'<p class="soft">{escape(text)}</p>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), ours: int = -1) -> str:
    """A table; ``numbers``: the columns that are aligned to the right; ``ours``: the row that stands out."""

    def cell(tag: str, place: int, text: str) -> str:
        kind = ' class="number"' if place in numbers else ' class="words"' if len(text) > 40 else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", place, text) for place, text in enumerate(columns))
    lines = ["".join(cell("td", place, text) for place, text in enumerate(row)) for row in rows]
    kinds = [' class="ours"' if number == ours else "" for number in range(len(lines))]
    body = "".join(f"<tr{kind}>{line}</tr>" for kind, line in zip(kinds, lines, strict=True))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _asset(name: str) -> str:
    text = resources.files("galvatron.planner.pages").joinpath("assets", name).read_text(encoding="utf-8")
    if "</script" in text.lower():
        raise AssertionError(f"{name} would end the script that it is in")
    return text
