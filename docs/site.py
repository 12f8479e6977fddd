"""Hooks of mkdocs, so that the pages of docs/ read on the site as they do in the repository."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
_ITEM = re.compile(r"(?:- |1\. )")


def on_config(config: Any) -> Any:
    """Headings get the anchors that the repository gives them."""
    config["mdx_configs"]["toc"]["slugify"] = _anchor
    return config


def _anchor(heading: str, separator: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", separator)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files outside docs/ become their names, and a list begins where its first item stands."""
    lines: list[str] = []
    fenced = False
    for line in _OUTSIDE.sub(r"\1", markdown).split("\n"):
        fenced ^= line.startswith("```")
        before = lines[-1] if lines else ""
        if _ITEM.match(line) and not fenced and before.strip() and not before.startswith((" ", "- ", "#")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
