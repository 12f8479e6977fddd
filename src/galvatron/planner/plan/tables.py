"""Models and clusters for people: the tables behind ``galvatron models`` and ``galvatron clusters``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.core.spec import Cluster, Collective, ModelProfile, ModelSpec
from galvatron.core.units import format_bytes, format_count, format_seconds

__all__ = ["clusters_view", "groups_view", "layers_view", "links_view", "models_view", "profile_view"]


def models_view(models: Sequence[ModelSpec]) -> RenderableType:
    """The models known by name, as a table."""
    table = _table("name", "family", "parameters", "layers", "forward FLOPs a sample", "activations a sample")
    for model in models:
        table.add_row(
            model.name,
            model.family,
            format_count(model.parameters),
            str(len(model.layers)),
            format_count(model.forward_flops),
            format_bytes(model.activation_bytes),
        )
    note = Text("Names that end in a depth exist for other depths too, such as bert-huge-96.", style="dim")
    return Group(table, note)


def layers_view(model: ModelSpec) -> RenderableType:
    """The kinds of layer of a model, as a table."""
    table = _table(
        "layers", "parameters", "forward FLOPs", "activations", "of these whole under TP", "output", "heads", left=1
    )
    position = 0
    for layer, run in groupby(model.layers):
        count = len(list(run))
        tensor = layer.tensor_parallel
        table.add_row(
            f"{position}–{position + count - 1} {layer.name}" if count > 1 else f"{position} {layer.name}",
            format_count(layer.parameters),
            format_count(layer.forward_flops),
            format_bytes(layer.activation_bytes),
            format_bytes(layer.replicated_activation_bytes),
            format_bytes(layer.boundary_bytes),
            "not split" if tensor is None else ", ".join(map(str, tensor.divides)) or "any",
        )
        position += count
    title = Text(f"{model.name}: {model.parameters:,} parameters, {model.training.precision}", style="bold")
    images = model.training.image_tokens
    seen = "" if images is None else f", {images} of its {model.training.sequence_length} tokens are of images"
    return Group(title, table, Text(f"Sizes are for one sample{seen}.", style="dim"))


def clusters_view(clusters: Sequence[Cluster]) -> RenderableType:
    """The clusters known by name, as a table."""
    table = _table("name", "devices", "memory", "fp32", "tf32", "bf16", "islands")
    for cluster in clusters:
        device = cluster.device
        table.add_row(
            cluster.name,
            f"{cluster.devices} × {device.name}",
            format_bytes(device.memory_bytes),
            _tera(device.fp32_flops_per_s),
            *("–" if rate is None else _tera(rate) for rate in (device.tf32_flops_per_s, device.bf16_flops_per_s)),
            " × ".join(f"{level.units} {level.name}" for level in cluster.levels),
        )
    note = (
        "fp32, tf32, bf16: TFLOP/s that a layer achieves. The name of a GPU is one node of 8; NAME:4 is one node of 4, "
        "NAME:2x8 two nodes of 8, NAME-64 eight of them. 'galvatron clusters NAME' shows its links; --toml makes a "
        "file of it."
    )
    return Group(table, Text(note, style="dim"))


def links_view(cluster: Cluster) -> RenderableType:
    """A cluster's links, level by level, as a table."""
    table = _table("level", "joins", "bandwidth", "point to point", "latency", "links")
    unit = "devices"
    for level in cluster.levels:
        transfer = level.transfer_bytes_per_s or level.bytes_per_s
        table.add_row(
            level.name,
            f"{level.units} {unit}",
            f"{level.bytes_per_s / 1e9:.3g} GB/s",
            f"{transfer / 1e9:.3g} GB/s",
            format_seconds(level.latency_s),
            "one link a unit" if level.shared else "a lane a device",
        )
        unit = f"× {level.name}"
    device = cluster.device
    title = Text(
        f"{cluster.name}: {cluster.devices} × {device.name}, {format_bytes(device.memory_bytes)} each", style="bold"
    )
    lost = f", {cluster.fragmentation:.0%} of the rest left to the allocator" if cluster.fragmentation else ""
    reserved = (
        f"memory: {format_bytes(cluster.reserved_bytes)} reserved a process{lost}\n"
        f"slowdown: {cluster.overlap_slowdown:g} while computing and communicating at once, "
        f"{cluster.compute_contention:g} while all devices compute, "
        f"{cluster.message_contention:g} of an exchange beside other messages"
    )
    return Group(title, table, Text(reserved), Text(cluster.source, style="dim"))


def groups_view(cluster: Cluster) -> RenderableType:
    """What was measured of groups: bus bandwidth, and latency of a pass."""
    table = _table("group of device 0", "devices", *(collective.replace("_", "-") for collective in Collective))
    for group in cluster.groups:
        links = [group.link(collective) for collective in Collective]
        figures = [
            "–" if link is None else f"{link.bytes_per_s / 1e9:.3g} GB/s, {format_seconds(link.latency_s)}"
            for link in links
        ]
        table.add_row(", ".join(map(str, group.ranks)), str(len(group.ranks)), *figures)
    return table


def profile_view(profile: ModelProfile) -> RenderableType:
    """Measured layers: seconds of one sample + fixed ones, and bytes of one sample."""
    table = _table("layer", "TP", "forward", "backward", "activations", "transient")
    for time in profile.times:
        fixed = [0.0 if one is None else one for one in (time.forward_fixed_s, time.backward_fixed_s)]
        slopes = [time.forward_s, time.forward_s * time.backward_ratio]
        least = [time.forward_least_s, time.backward_least_s]
        memory = None  # weighed where nothing but TP splits a layer
        if time.ep == 1 and not time.fused_loss:
            memory = profile.memory_of(time.layer, time.tp, sequence_parallel=time.sequence_parallel)
        switches = (("+sp", time.sequence_parallel), ("+fl", time.fused_loss), (f"/ep{time.ep}", time.ep > 1))
        table.add_row(
            time.layer,
            f"{time.tp}{''.join(text for text, given in switches if given)}",
            *map(_line, slopes, fixed, least),
            "–" if memory is None else format_bytes(memory.activation_bytes),
            "–" if memory is None else format_bytes(memory.transient_bytes),
        )
    title = Text(f"{profile.name}: time of each sample + fixed time", style="bold")
    return Group(title, table, Text(profile.source, style="dim"))


def _line(slope_s: float, fixed_s: float, least_s: float) -> str:
    line = f"{format_seconds(slope_s)} + {format_seconds(fixed_s)}"
    return f"{line}, at least {format_seconds(least_s)}" if least_s > slope_s + fixed_s else line


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.4g}"


def _table(*columns: str, left: int = 2) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table
