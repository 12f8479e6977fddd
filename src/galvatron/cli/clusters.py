"""``galvatron clusters``: the clusters known by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput

if TYPE_CHECKING:
    from galvatron.core.spec import Cluster

__all__ = ["command"]


def command(
    cluster: Annotated[
        str | None, typer.Argument(metavar="[CLUSTER]", help="Show one: a100, rtx4090:4, a100:2x8, or a .toml file.")
    ] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print it as a cluster file, to start your own from.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the clusters known by name, or show the devices and links of one."""
    from galvatron.families import cluster_names, load_cluster

    if toml and as_json:
        raise InvalidInput("--toml and --json contradict each other; give one of them")
    clusters = [load_cluster(name) for name in ([cluster] if cluster else cluster_names())]
    if toml:
        if cluster is None:
            raise InvalidInput("--toml: of which cluster? Name one, such as a100:2x8")
        typer.echo(_template(clusters[0]), nl=False)
        return
    if as_json:
        opt.print_json([{**each.to_dict(), "devices": each.devices} for each in clusters])
        return
    from galvatron.planner.plan.tables import clusters_view, links_view

    opt.show(links_view(clusters[0]) if cluster else clusters_view(clusters))


def _template(cluster: Cluster) -> str:
    from galvatron.core.files.clusters import dump_cluster

    return (
        f"# From the preset {cluster.name}: change what differs on your machines. docs/clusters.md explains each key.\n"
        "# 'galvatron profile cluster -o my-cluster.toml' measures all of it instead.\n" + dump_cluster(cluster)
    )
