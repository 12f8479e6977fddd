"""``galvatron profile cluster`` and ``galvatron profile model``: measured figures for the planner."""

from __future__ import annotations

from typing import Annotated

import typer

from galvatron.cli import options as opt
from galvatron.core.errors import InvalidInput
from galvatron.core.units import parse_seconds
from galvatron.planner.plan.options import help_of

__all__ = ["app"]

app = typer.Typer(help="Measure this machine's devices and links, or a model's layers on them.", no_args_is_help=True)

_UNLIMITED = "none"
Output = Annotated[str | None, typer.Option("--output", "-o", help="Write the figures to this .toml file.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again instead of using cached results.")]
RoundsOption = Annotated[int, typer.Option("--rounds", help="How many times everything is measured.")]


@app.command("cluster")
def cluster_command(
    devices: Annotated[
        int | None, typer.Option(help="Devices (default: all GPUs; without any, a CPU process for each core).")
    ] = None,
    virtual: opt.Virtual = None,
    output: Output = None,
    rounds: RoundsOption = 6,
    fresh: Fresh = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure this machine's devices and links (under torchrun: those of all machines)."""
    opt.need_torch("profile")
    from galvatron.cli.progress import shown_progress
    from galvatron.core.files.clusters import dump_cluster
    from galvatron.measure.clusters import profile_cluster
    from galvatron.processes.virtual import virtual_gpus

    opt.checked_file(output, ".toml", "my-cluster")
    with virtual_gpus(virtual), shown_progress("cluster") as progress:
        cluster = profile_cluster(devices, fresh=fresh, rounds=rounds, progress=progress)
    if not _speaks():
        return
    opt.write_file(output, dump_cluster(cluster))
    if as_json:
        opt.print_json({**cluster.to_dict(), "devices": cluster.devices})
        return
    from galvatron.planner.plan.tables import groups_view, links_view

    opt.show(links_view(cluster), groups_view(cluster), *_written(output, "--cluster"))


@app.command("model")
def model_command(
    model: opt.ModelSource,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="The cluster it is for: auto (this machine), a preset or a .toml.")
    ] = "auto",
    virtual: opt.Virtual = None,
    tp_degrees: Annotated[str | None, typer.Option(help="TP degrees to measure, such as 1,2,4 (default: all).")] = None,
    precision: opt.PrecisionKind = None,
    attention: opt.AttentionKind = None,
    dropout: Annotated[bool | None, typer.Option("--dropout/--no-dropout", help=help_of("dropout"))] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sample (default: the model's own).")] = None,
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help=help_of("compile"))] = None,
    output: Output = None,
    rounds: RoundsOption = 5,
    time_limit: Annotated[
        str, typer.Option(help="Time after which only whole layers are measured, such as 1h; none: no limit.")
    ] = "15min",
    fresh: Fresh = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure each kind of layer of MODEL: time over batch sizes and TP degrees, and memory."""
    opt.need_torch("profile")
    from dataclasses import asdict

    from galvatron.cli.progress import shown_progress
    from galvatron.core.files.profiles import dump_profile
    from galvatron.families import load_cluster
    from galvatron.measure.auto import AUTO
    from galvatron.measure.clusters import profile_cluster
    from galvatron.measure.layers import Effort, profile_model
    from galvatron.measure.models import check_name, load_any_model
    from galvatron.planner.plan.options import Setup
    from galvatron.planner.plan.setup import training_of
    from galvatron.processes.virtual import virtual_gpus

    opt.checked_file(output, ".toml", "my-profile")
    degrees = _degrees(tp_degrees)
    limit_s = None if time_limit == _UNLIMITED else parse_seconds(time_limit, where="time-limit")
    effort = Effort(rounds=rounds, limit_s=limit_s)
    setup = Setup(
        precision=precision, attention=attention, dropout=dropout, sequence_length=sequence_length, compile=compiled
    )
    check_name(model, training_of(setup))
    with virtual_gpus(virtual):
        with shown_progress("cluster") as progress:
            where = profile_cluster(progress=progress) if cluster == AUTO else load_cluster(cluster)
        spec = load_any_model(model, training_of(setup, where.device))
        with shown_progress(spec.name) as progress:
            profile = profile_model(spec, where, tp_degrees=degrees, fresh=fresh, effort=effort, progress=progress)
    if not _speaks():
        return
    opt.write_file(output, dump_profile(profile))
    if as_json:
        opt.print_json(asdict(profile))
        return
    from galvatron.planner.plan.tables import profile_view

    opt.show(profile_view(profile), *_written(output, "--profile"))


def _degrees(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"tp-degrees: {text!r} given; expected whole numbers such as 1,2,4") from None


def _speaks() -> bool:
    """Under torchrun one process speaks for all."""
    import os

    return os.environ.get("RANK", "0") == "0"


def _written(output: str | None, option: str) -> list[str]:
    return [] if output is None else [f"written to {output}; plan with {option} {output}"]
