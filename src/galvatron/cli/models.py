"""``galvatron models``: the models known by name."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt

__all__ = ["command"]


def command(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Show one model's layers.")] = None,
    precision: opt.PrecisionKind = "fp32",
    attention: opt.AttentionKind = "fused",
    paper: Annotated[bool, typer.Option("--paper", help="fp32 with the paper's attention, as its Table 1.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the models known by name, or show the layers of one."""
    from galvatron.families import load_model, model_names
    from galvatron.planner.plan.options import Setup
    from galvatron.planner.plan.setup import training_of

    training = training_of(Setup(precision=precision, attention="paper" if paper else attention))
    specs = [load_model(name, training) for name in ([model] if model else model_names())]
    if as_json:
        opt.print_json(
            [
                {
                    "name": spec.name,
                    "family": spec.family,
                    "parameters": spec.parameters,
                    "layers": len(spec.layers),
                    "activation_bytes": spec.activation_bytes,
                    "forward_flops": spec.forward_flops,
                }
                for spec in specs
            ]
        )
        return
    from galvatron.planner.plan.tables import layers_view, models_view

    opt.show(layers_view(specs[0]) if model else models_view(specs))
