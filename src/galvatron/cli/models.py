"""``galvatron models``: the models known by name."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.options import help_of

__all__ = ["command"]


def command(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Show one model's layers.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 (default), tf32 or bf16.")] = None,
    attention: opt.AttentionKind = None,
    paper: Annotated[bool, typer.Option("--paper", help="fp32 with the paper's attention, as its Table 1.")] = False,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sample (default: the model's own).")] = None,
    image_size: Annotated[int | None, typer.Option(help=help_of("image_size"))] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the model's facts to this .json file, to plan from.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the models known by name, or show the layers of one."""
    from galvatron.core.files.models import dump_model
    from galvatron.families import configured_names, load_model, model_names
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.options import Setup
    from galvatron.planner.plan.setup import training_of

    opt.checked_file(output, ".json", "my-model")
    if output is not None and model is None:
        raise InvalidInput(f"output: {output!r} given without a model; name the model whose facts it is to hold")
    if paper and (precision not in (None, "fp32") or attention not in (None, "paper")):
        given = ", ".join(
            f"--{name} {own}" for name, own in (("precision", precision), ("attention", attention)) if own
        )
        raise InvalidInput(f"--paper is fp32 with the paper's attention, but {given} is asked for; drop one of the two")
    training = training_of(
        Setup(
            precision=precision,
            attention="paper" if paper else attention,
            sequence_length=sequence_length,
            image_size=image_size,
        )
    )
    specs = [load_any_model(model, training)] if model else [load_model(name, training) for name in model_names()]
    if output is not None:
        opt.write_file(output, dump_model(specs[0]))
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

    if model:
        opt.show(layers_view(specs[0]), *([] if output is None else [f"written to {output}; plan with that file"]))
        return
    from rich.text import Text

    opt.show(models_view(specs), Text(f"also, by Hugging Face's configurations: {', '.join(configured_names())}"))
