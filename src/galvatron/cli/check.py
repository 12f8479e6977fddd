"""``galvatron check``: whether a model trains under a plan, or under every kind of strategy, as in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import Unequal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from galvatron.train.check import Verdict

__all__ = ["command"]


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN", help="A preset, a Hugging Face config.json or folder of any architecture, or a plan."
        ),
    ],
    devices: Annotated[
        int | None, typer.Option(help="Processes to try strategies on (default 4); not for a plan.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Compare loss and gradients of a tiny copy of the model, on local CPU processes, with the stock model's own.

    Under the plan, or under one of each kind of strategy. Ends with status 9 if any differs.
    """
    opt.need_torch("check")
    from galvatron.train.check import check

    verdicts = check(source, devices)
    if as_json:
        opt.print_json([{"strategy": each.name, "equal": each.equal, "reason": each.reason} for each in verdicts])
    else:
        opt.show(_table(verdicts))
    different = [each for each in verdicts if each.equal is False]
    if different:
        names = ", ".join(each.name for each in different)
        raise Unequal(
            f"{source}: {len(different)} of {len(verdicts)} differ from the stock model in one process: {names}"
        )


def _table(verdicts: Sequence[Verdict]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("beside the stock model in one process")
    words = {True: "equal", False: "differs", None: "not run"}
    for each in verdicts:
        table.add_row(each.name, f"{words[each.equal]}: {each.reason}" if each.reason else words[each.equal])
    return table
