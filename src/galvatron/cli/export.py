"""``galvatron export``: a checkpoint's weights as Hugging Face's models are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput

__all__ = ["command"]


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT_OR_RUN", help="A step's folder, or a run's, whose newest step is taken."),
    ],
    out: Annotated[str | None, typer.Argument(metavar="[OUTPUT]", help="The folder to make.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The folder to make, as an option.")] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the low-rank adapters, as peft writes them; else they are merged.")
    ] = False,
) -> None:
    """Write a folder that from_pretrained loads: config.json, safetensors, the run's tokenizer, generation settings."""
    opt.need_torch("export")
    from galvatron.train.checkpoints.folder import find

    if (out is None) == (output is None):
        raise InvalidInput("output: expected one folder to make: galvatron export RUN FOLDER, or --output FOLDER")
    out = out or output or ""
    if not out:
        raise InvalidInput("output: '' given; expected a folder's name")
    saved = find(Path(checkpoint))
    from galvatron.train.checkpoints.export import export
    from galvatron.train.run_folder import RunFolder

    run = RunFolder(saved.path.parent.parent)
    missing = export(saved, out, adapters=adapters, companions=run.companions, base=run.base if adapters else None)
    typer.echo(f"step {saved.step} of {saved.path.parent} exported to {out}" + (f"; {missing}" if missing else ""))
