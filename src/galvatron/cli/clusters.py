"""``galvatron clusters``: the clusters known by name."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt

__all__ = ["command"]


def command(
    cluster: Annotated[str | None, typer.Argument(metavar="[CLUSTER]", help="Show one cluster's links.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the clusters known by name, or show the devices and links of one."""
    from galvatron.families import cluster_names, load_cluster

    clusters = [load_cluster(name) for name in ([cluster] if cluster else cluster_names())]
    if as_json:
        opt.print_json([{**each.to_dict(), "devices": each.devices} for each in clusters])
        return
    from galvatron.planner.plan.tables import clusters_view, links_view

    opt.show(links_view(clusters[0]) if cluster else clusters_view(clusters))
