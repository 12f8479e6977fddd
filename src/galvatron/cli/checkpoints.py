"""``galvatron checkpoints``: what a run has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import CheckpointCorrupt, InvalidInput

__all__ = ["command"]


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder of checkpoints, or a run's.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare checksums.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the checkpoints of a run: steps, sizes, and whether they are complete and undamaged."""
    from galvatron.train.checkpoints.report import checkpoints_view, reports

    found = reports(Path(run), verify=verify)
    if not found:
        raise InvalidInput(f"{run}: no checkpoints there; expected a folder that holds step-00000010 and the like")
    if as_json:
        opt.print_json([report.to_dict() for report in found])
    else:
        opt.show(checkpoints_view(found))
    damaged = [report for report in found if report.damage is not None]
    if damaged:
        raise CheckpointCorrupt("; ".join(str(report.damage) for report in damaged))
