"""Shows how far something long has come, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["shown_progress", "shown_search"]

_LINES = 4
"""Lines in all, where there is no terminal."""


@contextmanager
def shown_search() -> Iterator[Callable[[float, float | None], None] | None]:
    """What is given is told how long a search has gone on, and by how much its best plan may be beaten. One line, on a
    terminal only: elsewhere there is nobody to wait."""
    if not sys.stderr.isatty():
        yield None
        return

    def line(elapsed_s: float, gap: float | None) -> None:
        found = "no plan yet" if gap is None else f"best plan so far within {gap:.2%} of the best"
        sys.stderr.write(f"\r\033[Ksearching: {elapsed_s:.0f} s, {found}")
        sys.stderr.flush()

    try:
        yield line
    finally:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


@contextmanager
def shown_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """What is given is told steps done, steps in all, and what is being done."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"measuring {title}", total=None, what="starting", visible=False)
            yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what, visible=True)
        return
    said: set[int] = set()

    def line(done: int, total: int, what: str) -> None:
        part = done * _LINES // max(total, 1)
        if part not in said:
            said.add(part)
            print(f"measuring {title}: {done} of {total} ({what})", file=sys.stderr, flush=True)  # noqa: T201

    yield line
