"""Draws the pictures in the documentation: ``python docs/pictures.py`` (or ``make pictures``)."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import galvatron
from galvatron.plans.render import plan_view

HERE = Path(__file__).parent


def main() -> None:
    """A plan as the terminal shows it."""
    console = Console(record=True, width=110, file=(HERE / "plan.txt").open("w", encoding="utf-8"))
    console.print("$ galvatron plan t5-large-48 --cluster titan-rtx-16 --memory 8GiB --batch 256")
    console.print(plan_view(galvatron.plan("t5-large-48", "titan-rtx-16", memory="8GiB", batch=256)))
    console.save_svg(str(HERE / "plan.svg"), title="galvatron")
    (HERE / "plan.txt").unlink()


if __name__ == "__main__":
    main()
