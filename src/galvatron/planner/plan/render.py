"""Plans for people: tables and a strip picture in the terminal, plain text in a pipe.

Returns rich renderables; which colours a console can show is rich's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.core.spec import ADAMW, LAYER_SWITCHES, SWITCHES
from galvatron.core.units import GIB, format_bytes, format_count, format_seconds
from galvatron.planner.plan.assumed import assumed_rates
from galvatron.planner.plan.compare import Comparison
from galvatron.planner.plan.explain import Explanation, time_shares
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import PlannedStage, layer_runs

__all__ = ["comparison_view", "explanation_view", "plan_view"]

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "bright_yellow")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_STRIP = 40


def _trained(plan: Plan) -> str:
    if not plan.model.training.tunes:
        return ""
    return f" ({format_count(plan.model.spec().trained_parameters)} of them trained)"


def plan_view(plan: Plan) -> RenderableType:
    """What the plan is, its stages as strips of layers, and its certificate."""
    model, facts, training = plan.model, plan.cluster.facts, plan.model.training
    title = Text(f"{model.name}", style="bold")
    length = "" if training.sequence_length is None else f", {training.sequence_length} tokens a sample"
    title.append(
        f"  {format_count(model.parameters)} parameters{_trained(plan)}, "
        f"{sum(run.count for run in model.order)} layers, "
        f"{training.precision}{_optimizer(plan)}{', compiled' if training.compile else ''}{length}\n"
        f"on {plan.cluster.devices} × {facts.device.name} ({facts.name})",
        style="default",
    )
    numbers = Text()
    numbers.append(f"{plan.throughput:.2f} samples/s", style="bold green")
    numbers.append(f"{_tokens_per_s(plan)}{_share_of_peak(plan)}\n")
    batch = f"batch {plan.batch} = {plan.micro_batches} × {plan.micro_batch}"
    tokens = (
        "" if training.sequence_length is None else f" ({format_count(plan.batch * training.sequence_length)} tokens)"
    )
    numbers.append(
        f"{batch}{tokens}   iteration {format_seconds(plan.iteration_s)}   "
        f"{_plural(plan.pipeline_degree, 'stage')} ({plan.schedule})\n"
        f"memory {format_bytes(plan.memory_bytes)} of {format_bytes(plan.memory_budget_bytes)}{_margin(plan)}"
    )
    certificate = Text(_certificate(plan), style="dim")
    return Group(title, numbers, _strips(plan), _Legend(plan), certificate, *_notes(plan))


def _certificate(plan: Plan) -> str:
    proof = plan.certificate
    if proof is None:
        return "written by hand: nothing is proven about it"
    left = proof.combinations - proof.solved
    others = f"{left} configurations {'ruled out' if proof.gap == 0 else 'only bounded'}"
    return f"{proof.proven} in the {plan.space.name!r} space{_rules(plan)}; {others}, {proof.solved} solved exactly"


def _tokens_per_s(plan: Plan) -> str:
    length = plan.model.training.sequence_length
    if length is None:
        return ""
    rate = plan.throughput * length
    return f" = {rate:,.0f} tokens/s ({rate / plan.cluster.devices:,.0f} a device)"


def _share_of_peak(plan: Plan) -> str:
    """Model FLOPs a second over the data sheet's (MFU): three forward passes a sample, recomputation not counted."""
    training, device = plan.model.training, plan.cluster.facts.device
    peak = device.peak_flops_per_s(training.precision)
    if peak is None or training.tunes:
        return ""
    achieved = 3 * plan.model.spec().forward_flops * plan.throughput / plan.cluster.devices
    return f"   {achieved / peak:.0%} of peak (MFU)"


def _margin(plan: Plan) -> str:
    left = plan.cluster.facts.allocator_bytes(plan.memory_budget_bytes)
    return f"; {format_bytes(left)} are left to the allocator" if left > 0 else ""


def _notes(plan: Plan) -> Iterator[Text]:
    training, batches = plan.model.training, plan.space.batches
    seen = training.image_tokens
    if seen is not None:
        side = training.image_size
        size = "" if side is None else f" (one of {side} × {side} pixels)"
        yield Text(f"{seen} of {training.sequence_length} tokens a sample are of images{size}", style="dim")
    divided = max((own.context_degree for stage in plan.stages for own in stage.strategies), default=1)
    if divided > 1:
        whole = format_bytes(plan.model.spec().activation_bytes)
        yield Text(
            f"samples of {training.sequence_length:,} tokens are divided over {divided} devices: whole, one would keep "
            f"{whole} for backward without recompute",
            style="dim",
        )
    if len(batches) > 1:
        largest = f"the fastest of {batches[0]}, {batches[1]} … {batches[-1]} samples"
        length = training.sequence_length
        tokens = "" if length is None else f" (at most {format_count(batches[-1] * length)} tokens)"
        remedy = "--batch or --batch-tokens fixes yours, --batch best tries larger ones"
        yield Text(f"batch: {largest}{tokens}; {remedy}", style="dim")


def _optimizer(plan: Plan) -> str:
    """Said where it is not the usual one."""
    name = plan.model.training.optimizer
    return "" if name == ADAMW.name else f", {name}"


def _rules(plan: Plan) -> str:
    """What else bounded the search: extensions that were on, a guideline for cuts, a limit on micro-batches."""
    space = plan.space
    on = [switch.name.replace("_", " ") for switch in SWITCHES if getattr(space, switch.name)]
    rules = [f"with {', '.join(on)}"] if on else []
    if space.cuts != "exact":
        rules.append(f"cuts by {space.cuts}")
    if space.max_micro_batches is not None:
        deep = "" if space.stages_a_micro_batch is None else f", or one for {space.stages_a_micro_batch} stages"
        rules.append(f"at most {space.max_micro_batches} micro-batches{deep}")
    if space.limits:
        rules.append(f"within {space.limits}")
    return f" ({'; '.join(rules)})" if rules else ""


def _strips(plan: Plan) -> Table:
    """One line a stage; a letter a layer, the same letter (and colour) for the same strategy."""
    letters = _letters(plan)
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for name, justify in (("stage", "right"), ("devices", "left"), ("layers", "left"), ("memory", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for number, stage in enumerate(plan.stages):
        used = stage.memory_bytes / plan.memory_budget_bytes
        table.add_row(str(number), _span(stage), _strip(stage, letters), f"{_bar(used)} {used:.0%}")
    return table


@dataclass(frozen=True, slots=True)
class _Legend:
    """What each letter stands for. A line ends between two of them, never between a letter and its strategy."""

    plan: Plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text(" ")
        for strategy, letter in _letters(self.plan).items():
            entry = Text.assemble((f" {letter} ", _style(letter)), f" {strategy}   ")
            if len(line) > 1 and len(line) + len(entry.plain.rstrip()) > options.max_width:
                yield line
                line = Text(" ")
            line.append_text(entry)
        yield line


def _letters(plan: Plan) -> dict[str, str]:
    used = dict.fromkeys(layer.strategy for stage in plan.stages for layer in stage.layers)
    return {strategy: _LETTERS[index % len(_LETTERS)] for index, strategy in enumerate(used)}


def _style(letter: str) -> str:
    return f"black on {_COLOURS[_LETTERS.index(letter) % len(_COLOURS)]}"


def _strip(stage: PlannedStage, letters: dict[str, str]) -> Text:
    text = Text()
    scale = max(1.0, len(stage.layers) / _STRIP)
    for strategy, run in groupby(stage.layers, key=lambda layer: layer.strategy):
        letter = letters[strategy]
        text.append(letter * max(1, round(len(list(run)) / scale)), style=_style(letter))
    return text


def _bar(share: float) -> str:
    full = min(10, round(10 * share))
    return "█" * full + "░" * (10 - full)


def _span(stage: PlannedStage) -> str:
    first, last = stage.devices[0], stage.devices[-1]
    return str(first) if first == last else f"{first}–{last}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def explanation_view(explanation: Explanation) -> RenderableType:
    """An explanation as people see it in a terminal."""
    plan = explanation.plan
    return Group(
        plan_view(plan),
        Text("\nWhere the time of an iteration goes (slowest stage)", style="bold"),
        _shares(plan),
        *_rates(plan),
        Text("\nStages and layers", style="bold"),
        _layers(explanation),
        Text(f"\nMemory of a device at the peak, in GiB, of {format_bytes(plan.memory_budget_bytes)}", style="bold"),
        _memory(plan),
        Text("\nThe best plan of every space", style="bold"),
        _rivals(explanation),
        _one_more(explanation),
        *_lengths(explanation),
        *_imbalances(plan),
        *_attention_share(plan),
    )


def _lengths(explanation: Explanation) -> Iterator[Text]:
    """How long samples may be, here and with more devices."""
    plan = explanation.plan
    if explanation.longest is not None:
        yield Text(f"Samples of up to {explanation.longest:,} tokens fit (at the smallest batch).")
    for more in explanation.larger:
        what = f"With {more.devices} instead of {plan.cluster.devices} devices "
        gain = 0.0 if more.plan is None else more.plan.throughput / plan.throughput - 1
        bought = f"{gain:.0%} more samples/s" if gain > 0 else "no more samples/s"
        longer = "" if more.longest is None else f", and samples of up to {more.longest:,} tokens fit"
        yield Text(f"{what}there would be {bought}{longer}.")


def _attention_share(plan: Plan) -> Iterator[Text]:
    """What is assumed about attention where its sequences are divided."""
    divided = {
        layer.layer
        for stage in plan.stages
        for layer, strategy in zip(stage.layers, stage.strategies, strict=True)
        if strategy.context_degree > 1
    }
    for kind in plan.model.kinds:
        if kind.name in divided and kind.context is not None and kind.context.heads:
            share = kind.context.attention_flops / max(kind.forward_flops, 1)
            basis = "counted time" if plan.profile is None else "time of whole sequences as measured"
            yield Text(
                f"Assumed: of the {basis} of {kind.name!r} attention takes {share:.0%}, its part of the operations; "
                "each device takes its share of that, and exchanges are counted from the links."
            )


def _imbalances(plan: Plan) -> Iterator[Text]:
    """What is assumed about the tokens of experts, which the router decides while it trains."""
    for kind in plan.model.kinds:
        if kind.experts is not None:
            factor = f"{kind.experts.imbalance:g} times the mean" if kind.experts.imbalance > 1 else "the mean"
            yield Text(
                f"Assumed: where EP divides the experts of {kind.name!r}, the busiest device has {factor} of their "
                "tokens (--expert-imbalance)."
            )


def _shares(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, share in sorted(time_shares(plan).items(), key=lambda item: -item[1]):
        if share >= 0.0005:
            table.add_row(f"{share:6.1%}", _bar(share), name)
    return table


def _rates(plan: Plan) -> Iterator[RenderableType]:
    """What prices assume of the computation itself."""
    rates = assumed_rates(plan)
    if not rates:
        return
    yield Text("\nComputation, as assumed: forward and backward, while they run", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    for rate in rates:
        share = "" if rate.share is None else f"{rate.share:.0%} of peak"
        table.add_row(rate.layer, rate.strategy, f"{rate.flops_per_s / 1e12:.4g} TFLOP/s", share, rate.basis)
    yield table


def _layers(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for name in ("stage", "layers", "strategy", "what it means", "why"):
        table.add_column(name, overflow="fold")
    for number, stage in enumerate(explanation.plan.stages):
        for layer, count in layer_runs(stage.layers):
            last = layer.index + count - 1
            span = str(layer.index) if count == 1 else f"{layer.index}–{last}"
            meaning = "; ".join(_meaning(layer.strategy))
            reason = explanation.reasons[layer.index]
            table.add_row(str(number), f"{span} {layer.layer}", layer.strategy, meaning, reason)
    return table


def _meaning(strategy: str) -> Iterator[str]:
    axes, *flags = strategy.split("+")
    dense, _, experts = axes.partition("/")
    yield from _axis_meanings(dense)
    if experts:
        yield f"experts: {', '.join(_axis_meanings(experts))}"
    notes = {switch.text: switch.note for switch in LAYER_SWITCHES}
    yield from (notes[flag] for flag in flags)


def _axis_meanings(axes: str) -> Iterator[str]:
    words = {
        "sdp": "{}-way sharded states",
        "dp": "{} replicas",
        "tp": "weights split {} ways",
        "ep": "divided {} ways",
        "ring": "sequence over a ring of {}",
        "ulysses": "sequence split {} ways, heads in attention",
        "single": "one device",
    }
    for axis in axes.split("-"):
        kind = axis.rstrip("0123456789")
        yield words[kind].format(axis[len(kind) :])


def _memory(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0)
    for name in ("stage", "states", "activations", "in flight", "transient", "reserved", "peak", "allocator", "left"):
        table.add_column(name, justify="right")
    margin = plan.cluster.facts.allocator_bytes(plan.memory_budget_bytes)
    for number, stage in enumerate(plan.stages):
        use = stage.memory
        left = plan.memory_budget_bytes - margin - stage.memory_bytes
        sizes = [use.states, use.activations, use.transient, use.reserved, stage.memory_bytes, margin, left]
        states, activations, *others = (f"{size / GIB:.3g}" for size in sizes)
        table.add_row(str(number), states, activations, str(stage.in_flight), *others)
    return table


def _rivals(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for name, justify in (("space", "left"), ("samples/s", "right"), ("of ours", "right"), ("batch", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("stages", justify="right")
    table.add_column("bottleneck")
    ours = explanation.plan.throughput
    for rival in explanation.rivals:
        if rival.plan is None:
            table.add_row(rival.space, "–", "–", "–", "–", rival.obstacle, style="dim")
            continue
        plan = rival.plan
        table.add_row(
            rival.space,
            f"{plan.throughput:.2f}",
            f"{plan.throughput / ours:.0%}",
            str(plan.batch),
            str(plan.pipeline_degree),
            rival.obstacle,
            style="bold" if rival.space == explanation.plan.space.name else "",
        )
    return table


def _one_more(explanation: Explanation) -> Text:
    more, plan = explanation.one_more_gib, explanation.plan
    gain = more.throughput / plan.throughput - 1
    if gain <= 0:
        return Text("\nOne more GiB a device would buy nothing.")
    return Text(f"\nOne more GiB a device would buy {gain:.1%}: {more.throughput:.2f} samples/s at batch {more.batch}.")


def comparison_view(comparison: Comparison) -> RenderableType:
    """A comparison as a table."""
    request = comparison.request
    title = Text(
        f"{request.model.name} on {request.cluster.devices} × {request.cluster.device.name} ({request.cluster.name}): "
        "samples/s (batch)",
        style="bold",
    )
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("space")
    for budget in comparison.budgets:
        table.add_column(format_bytes(budget), justify="right")
    best = [
        max((cell.plan.throughput for cell in column if cell.plan), default=0.0)
        for column in zip(*comparison.rows, strict=True)
    ]
    for row in comparison.rows:
        cells = [Text(row[0].space)]
        for cell, top in zip(row, best, strict=True):
            if cell.plan is None:
                cells.append(Text("OOM" if cell.why_not == "out of memory" else cell.why_not, style="dim"))
            else:
                style = "bold green" if cell.plan.throughput >= top else ""
                cells.append(Text(f"{cell.plan.throughput:.2f} ({cell.plan.batch})", style=style))
        table.add_row(*cells)
    return Group(title, table)
