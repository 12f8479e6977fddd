"""What a person sees while a model trains: one line that moves on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from galvatron.core.units import format_bytes, format_seconds

__all__ = ["Display", "say"]

_LINES = 20
"""Of a whole run, where output is no terminal."""


def say(text: str) -> None:
    """One line, before there is anything else to show."""
    Console(highlight=False).print(text, markup=False, soft_wrap=True)


class Display:
    """Of rank 0."""

    def __init__(self, steps: int, first_step: int) -> None:
        self._steps, self._first = steps, first_step
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=140, no_color=True)
        self._progress: Progress | None = None
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                _Figures(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("training", total=steps, completed=first_step, figures="")
            self._progress.start()

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        text = figures_line(figures)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=text)
        elif step == self._steps or step <= self._first + 1 or step % max(1, self._steps // _LINES) == 0:
            done = step - self._first
            left = (time.monotonic() - self._started) / done * (self._steps - step)
            self.say(f"step {step}/{self._steps}  {text}  left {format_seconds(left)}")

    def evaluated(self, step: int, loss: float) -> None:
        self.say(f"step {step}/{self._steps}  evaluation loss {loss:.4f}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def view(self, view: RenderableType) -> None:
        self._console.print(view)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["figures"]))


def figures_line(figures: Mapping[str, float]) -> str:
    """The figures of a step in one line."""
    parts = [f"loss {figures['loss']:.4f}", f"norm {figures['gradient_norm']:.3f}"]
    parts.append(f"{figures['samples_per_s']:.1f} samples/s")
    if "tokens_per_s" in figures:
        parts.append(f"{figures['tokens_per_s']:,.0f} tokens/s")
    parts.append(format_bytes(int(figures["memory_bytes"])))
    if "peak_share" in figures:
        parts.append(f"{figures['peak_share']:.1%} of peak")
    return "  ".join(parts)
