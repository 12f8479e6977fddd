"""``galvatron price``: what a layout of another system costs, and what would be faster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.options import Setup

__all__ = ["EXAMPLES", "command"]

EXAMPLES = (
    "Examples:",
    'galvatron price llama3-70b --cluster h100-64 --from megatron "--tensor-model-parallel-size 4 …"',
    "galvatron price llama3-8b --cluster h100-8 --from deepspeed ds_config.json",
)
_SAID_BY_LAYOUT = (
    "batch", "batch_tokens", "batch_step", "max_batch", "max_micro_batches", "max_micro_batch", "space", "schedule",
    "cuts", "paper", "pipeline", "pin", "forbid", "freeze", "train_only", "lora", "lora_alpha", "lora_targets",
    "lora_full", "float8",
)  # fmt: skip


@opt.arranged(opt.SETUP_PANELS)
@opt.takes_setup(*_SAID_BY_LAYOUT)
def command(
    model: opt.ModelSource,
    cluster: opt.ClusterSource,
    layout: Annotated[
        tuple[str, str],
        typer.Option(
            "--from",
            metavar="SYSTEM LAYOUT",
            help="megatron, torchtitan or deepspeed, and its options or a file of them.",
        ),
    ],
    setup: Setup,
    as_json: opt.AsJson = False,
) -> None:
    """Price the layout of another system: whether it fits, how fast it is, and what would be faster."""
    from galvatron.measure.models import load_any_model
    from galvatron.planner.exchange.pricing import price_layout, source_named
    from galvatron.planner.exchange.views import price_entry, price_view
    from galvatron.planner.plan.setup import cluster_for, request_for

    system, text = layout
    source = source_named(system)
    text = _content(text)
    devices = cluster_for(cluster, setup).devices
    said = source.setup(text, devices)
    for name, value in said.items():
        own = setup.get(name)
        if own is not None and own != value:
            raise InvalidInput(
                f"{name.replace('_', '-')}: {own} given, but the layout says {value}; leave one of the two out"
            )
    request = request_for(model, cluster, cast(Setup, {**setup, **said}), load_any_model)
    price = price_layout(request, source, text)
    if as_json:
        opt.print_json(price_entry(price))
        return
    opt.show(price_view(price))


def _content(given: str) -> str:
    """The layout's text, from a file where one is named."""
    if given.lstrip().startswith(("-", "{")):
        return given
    from galvatron.core.files.reader import read_text

    return read_text(Path(given), "a layout's options, or a file of them")
