"""``galvatron doctor``: what works on this machine, and what does not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from galvatron.cli import options as opt

__all__ = ["command"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def command(
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Folder that runs would be written to (default: this one).")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show what works on this machine: versions, GPUs, links, compiler, disk, ports.

    Ends with status 1 if training cannot work here.
    """
    from galvatron.measure.doctor import State, examine

    findings = examine(None if output is None else Path(output))
    if as_json:
        opt.print_json([asdict(finding) for finding in findings])
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            remedy = f" → {finding.remedy}" if finding.remedy else ""
            state = Text(finding.state, style=_STYLES[finding.state])
            table.add_row(state, Text(finding.what, no_wrap=True), Text(finding.found + remedy, overflow="fold"))
        opt.show(table)
    if any(finding.state is State.FAIL for finding in findings):
        raise typer.Exit(1)
