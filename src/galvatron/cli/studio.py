"""``galvatron studio``: the planner as a page, on this machine alone."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["EXAMPLES", "command"]

EXAMPLES = (
    "Examples:",
    "galvatron studio",
    "galvatron studio --port 8000   # then, from a laptop: ssh -L 8000:localhost:8000 MACHINE",
)


def command(
    port: Annotated[int, typer.Option(help="Port of the loopback interface (default: any that is free).")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
) -> None:
    """Ask the planner on a page: move memory, batch and switches, and see the plan follow."""
    from galvatron.studio.serve import serve

    def ready(address: str) -> None:
        typer.echo(f"{address}   (Ctrl-C ends it)")
        if show:
            import webbrowser

            webbrowser.open(address)

    serve(port, ready)
