"""What the intake found, as tables: counts, reasons, and a row for each architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "EQUAL", "FAILED", "REFUSED", "WRONG", "counts", "read", "rendered", "write_report"]

COLUMNS = ("planned", "DP", "SDP", "PP", "TP", "EP", "plan")
EQUAL, REFUSED, WRONG, FAILED = "equal", "refused", "WRONG", "failed"
_BEGIN, _END = "<!-- intake: begin -->", "<!-- intake: end -->"
_HEADING = "## Every architecture of transformers"
_SHOWN = 3
"""Examples of a reason."""

Row = Mapping[str, Any]


def read(path: Path) -> dict[str, Row]:
    """The last result of each architecture; empty if there is no file."""
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["architecture"]: row for row in rows}


def write_report(rows: Mapping[str, Row], document: Path) -> None:
    """Put the tables between the markers of the document, or at its end."""
    text = document.read_text(encoding="utf-8")
    section = f"{_BEGIN}\n{rendered(list(rows.values()))}\n{_END}"
    before, begin, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2] if begin else "\n"
    heading = "" if begin else f"\n{_HEADING}\n"
    document.write_text(f"{before}{heading}{section}{after}", encoding="utf-8")


def rendered(rows: Sequence[Row]) -> str:
    """The tables in Markdown."""
    reasons = _reasons(rows)
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    parts = [
        f"{len(rows)} classes, each as a tiny model: 3 steps of AdamW in fp32 on two processes, losses, gradients and "
        "parameters compared with the stock model's own in one. *planned*: the planner makes a plan; *plan*: that plan "
        "runs and is equal. Cells count the classes that are equal.",
        _table(("head", "classes", *COLUMNS), _grouped(rows, lambda row: row["head"])),
        _table(("", "classes", *COLUMNS), _grouped(rows, _plans)),
        "Why not, the commonest first:",
        _table(("", "reason", "classes", "such as"), _listed(reasons)),
        "Each class; a number is a reason above.",
        _table(
            ("class", *COLUMNS), (_cells(row, numbers) for row in sorted(rows, key=lambda row: row["architecture"]))
        ),
    ]
    return "\n\n".join(parts)


def counts(rows: Sequence[Row]) -> list[int]:
    """How many of them are equal, by column."""
    return [sum(_outcome(row, column)[0] == EQUAL for row in rows) for column in COLUMNS]


def _outcome(row: Row, column: str) -> tuple[str, str]:
    found = row["columns"].get(column)
    return (found["outcome"], found["reason"]) if found else (FAILED, row.get("crashed", "not run"))


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> Iterator[Sequence[Any]]:
    for group in dict.fromkeys(map(key, rows)):
        chosen = [row for row in rows if key(row) == group]
        yield group, len(chosen), *counts(chosen)
    yield "all", len(rows), *counts(rows)


def _plans(row: Row) -> str:
    if "tp_plan" not in row:
        return "not built"
    return ("with" if row["tp_plan"] else "without") + " a TP plan" + (", with an EP plan" if row["ep_plan"] else "")


def _general(row: Row, reason: str) -> str:
    """A reason without what belongs to one model: its name, numbers, paths of modules."""
    text = reason.removeprefix(f"{row['architecture']}: ").replace(row["architecture"], "the class")
    text = re.sub(r"\b[\w.]*\.(\w+)\b(?= runs| is | \(|,|;|$)", r"\1", text)
    return re.sub(r"\d[\d,.]*", "N", text)


def _reasons(rows: Sequence[Row]) -> dict[tuple[str, str], list[str]]:
    """Outcome and reason with the classes, the worst outcomes and then the commonest first."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for column in COLUMNS:
            outcome, reason = _outcome(row, column)
            if outcome != EQUAL:
                names = found.setdefault((outcome, _general(row, reason)), [])
                if row["architecture"] not in names:
                    names.append(row["architecture"])
    order = (WRONG, FAILED, REFUSED)
    return dict(sorted(found.items(), key=lambda entry: (order.index(entry[0][0]), -len(entry[1]))))


def _listed(reasons: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[Sequence[Any]]:
    for number, ((outcome, reason), names) in enumerate(reasons.items(), 1):
        said = reason if outcome == REFUSED else f"**{outcome}**: {reason}"
        yield number, said.replace("|", "\\|"), len(names), ", ".join(names[:_SHOWN])


def _cells(row: Row, numbers: Mapping[tuple[str, str], int]) -> Iterator[Any]:
    yield row["architecture"]
    for column in COLUMNS:
        outcome, reason = _outcome(row, column)
        fine = "yes" if column == "planned" else EQUAL
        yield fine if outcome == EQUAL else numbers[outcome, _general(row, reason)]


def _table(head: Sequence[str], rows: Iterator[Any]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
