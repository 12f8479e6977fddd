"""``galvatron rehearse``: one rank of a plan by itself, to see what it really takes."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput

__all__ = ["command"]


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.")],
    rank: Annotated[int | None, typer.Option(help="The rank to run (default: 0).")] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="The first rank of each stage instead.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    virtual: opt.Virtual = None,
    steps: Annotated[int, typer.Option(help="Iterations to take the time of, after two others.")] = 3,
    as_json: opt.AsJson = False,
) -> None:
    """Run one rank's exact share of a plan on one device, without the others: its true peak memory and compute time."""
    opt.need_torch("rehearse")
    from galvatron.measure.rehearsal.processes import first_ranks, rehearse
    from galvatron.planner.plan.plan import Plan
    from galvatron.processes.virtual import check_virtual, virtual_gpus

    if rank is not None and all_stages:
        raise InvalidInput(f"--rank {rank} and --all-stages: give one of the two")
    loaded = Plan.load(plan)
    ranks = first_ranks(loaded) if all_stages else [rank or 0]
    if virtual is not None and device == "cpu":
        raise InvalidInput(f"--virtual {virtual} and --device cpu: give one of the two")
    with virtual_gpus(virtual):
        check_virtual(loaded.cluster.devices)
        rehearsals = rehearse(loaded, ranks, device=device, steps=steps)
    if as_json:
        opt.print_json([rehearsal.to_dict() for rehearsal in rehearsals])
        return
    from galvatron.measure.rehearsal.results import rehearsal_view

    opt.show(rehearsal_view(loaded, rehearsals))
