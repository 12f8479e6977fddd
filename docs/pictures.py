"""Draws the pictures in the documentation: ``python docs/pictures.py`` (or ``make pictures``)."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import galvatron
from galvatron.planner.plan.render import plan_view

HERE = Path(__file__).parent


def main() -> None:
    """A plan as the terminal shows it."""
    console = Console(record=True, width=110, file=(HERE / "plan.txt").open("w", encoding="utf-8"))
    console.print("$ galvatron plan llama3-8b --cluster h100-8 --batch 128")
    console.print(plan_view(galvatron.plan("llama3-8b", "h100-8", batch=128)))
    console.save_svg(str(HERE / "plan.svg"), title="galvatron")
    (HERE / "plan.txt").unlink()


if __name__ == "__main__":
    main()
