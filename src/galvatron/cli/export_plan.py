"""``galvatron export-plan``: a plan as flags or configuration of another system."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt

__all__ = ["EXAMPLES", "command"]

EXAMPLES = (
    "Examples:",
    "galvatron export-plan plan.json --to megatron",
    "galvatron export-plan plan.json --to accelerate --output accelerate.yaml",
)


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.")],
    to: Annotated[str, typer.Option("--to", help="megatron, torchtitan, deepspeed, accelerate or automodel.")],
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write it to this file.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a plan that the system cannot run, and say which layer.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Write a plan for another system; what that cannot run is replaced by the best plan that it can."""
    from galvatron.planner.exchange.export import export_plan, target_named
    from galvatron.planner.exchange.views import export_entry, export_file, export_lines
    from galvatron.planner.plan.plan import Plan

    target = target_named(to)
    opt.checked_file(output, target.suffix, target.name)
    export = export_plan(Plan.load(plan), target, strict=strict)
    said = list(export_lines(export))
    text = export_file(export)
    opt.write_file(output, text)
    if as_json:
        opt.print_json(export_entry(export))
        return
    if output is None:
        typer.echo(text, nl=False)
    for line in said if output is not None or not target.comment else ():
        typer.echo(line, err=output is None)
    if output is not None:
        typer.echo(f"written to {output}")
