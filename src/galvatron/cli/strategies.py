"""``galvatron strategies``: the decision trees of the space (paper Section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput

if TYPE_CHECKING:
    from rich.tree import Tree

    from galvatron.core.spec import Strategy

__all__ = ["command"]

_MOST_DEVICES = 1 << 14


def command(
    devices: Annotated[int, typer.Option(help="Total number of devices.")],
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Leave out HSDP (DP together with SDP), as the paper does.")
    ] = True,
    as_json: opt.AsJson = False,
) -> None:
    """List the strategies that a layer can have on this many devices, as the paper's decision trees."""
    from galvatron.planner.space import RULES, Switches, space_named

    if not 1 <= devices <= _MOST_DEVICES:
        raise InvalidInput(f"devices: {devices} given; it must be between 1 and {_MOST_DEVICES}")
    space = space_named("full", Switches(hybrid_sharding=not prune))
    candidates = {degree: space.strategies(devices // degree) for degree in space.pipeline_degrees(devices)}
    total = sum(len(strategies) for strategies in candidates.values())
    if as_json:
        by_degree = {str(degree): [str(each) for each in strategies] for degree, strategies in candidates.items()}
        opt.print_json({"devices": devices, "pruned": prune, "total": total, "by_pipeline_degree": by_degree})
        return
    opt.show(f"{total} candidate strategies for a layer on {devices} devices")
    opt.show(*(_tree(degree, devices // degree, strategies) for degree, strategies in candidates.items()))
    opt.show(*(f"{rule.name}: {rule.statement}" for rule in RULES if prune or not rule.prunes))


def _tree(degree: int, stage_devices: int, strategies: tuple[Strategy, ...]) -> Tree:
    """The decision tree of one pipeline degree: a level a parallelism, outermost first."""
    from rich.tree import Tree

    root = Tree(f"pp{degree}: stages of {stage_devices}, {len(strategies)} candidates")
    nodes: dict[tuple[str, ...], Tree] = {(): root}
    for strategy in strategies:
        path: tuple[str, ...] = ()
        for axis in strategy.axes:
            parent, path = path, (*path, f"{axis.kind}{axis.degree}")
            if path not in nodes:
                nodes[path] = nodes[parent].add(path[-1])
    return root
