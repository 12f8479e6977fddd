"""What a system that plans are exported to can do, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from galvatron.core.spec import GPIPE, ONE_F_ONE_B, ModelSpec
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform

__all__ = ["Target", "notes_to_programs", "refusal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A system: which uniform layouts it has options for, and what they look like."""

    name: str
    """On the command line."""
    title: str
    suffix: str
    """Of the file that it reads."""
    comment: str
    """What begins a line of that file which says something to people; empty: there is none."""
    pipelines: bool
    shardings: frozenset[Sharding]
    hybrid: bool
    """Whether replicas may hold shards: HSDP."""
    sequence_parallel: bool
    recompute: frozenset[Recompute]
    partial: bool
    """Whether only some blocks of each stage may be recomputed."""
    fused_loss: bool
    experts: bool
    """Whether experts may be divided by their number."""
    optimizers: frozenset[str]
    more: Callable[[Uniform, ModelSpec], str | None]
    """What else is in the way of a layout, in words that follow "it"; None: nothing."""
    write: Callable[[Uniform, ModelSpec], str]
    """The text of the file."""
    notes: Callable[[Uniform, ModelSpec], tuple[str, ...]]
    """What the file cannot say, or what the system does otherwise than was priced."""


def refusal(target: Target, layout: Uniform, model: ModelSpec) -> str | None:
    """Why a system cannot run a layout, in words that follow its name; None: it can."""
    training = model.training
    if training.optimizer not in target.optimizers:
        return f"has no option for optimizer {training.optimizer!r}"
    if training.float8:
        return "would round float8 in another way than was planned for"
    if layout.pipeline > 1 and not target.pipelines:
        return f"has no option for a pipeline, and there are {layout.pipeline} stages"
    if layout.schedule not in (GPIPE.name, ONE_F_ONE_B.name):
        return f"is not told of schedule {layout.schedule!r}"
    if layout.data > 1 and layout.sharding not in target.shardings:
        what = "nothing" if layout.sharding is Sharding.NONE else layout.sharding
        return f"has no option by which data-parallel ranks divide {what}"
    if layout.replicas > 1 and layout.shards > 1 and not target.hybrid:
        return f"has no option for {layout.replicas} replicas of {layout.shards} shards"
    if layout.sequence_parallel and not target.sequence_parallel:
        return "has no option for sequence parallelism"
    if layout.recompute not in target.recompute:
        return f"has no option for recompute of {layout.recompute}"
    if layout.recomputed is not None and not target.partial:
        return f"recomputes all blocks or none, not {layout.recomputed} of each stage"
    if layout.fused_loss and not target.fused_loss:
        return "has no loss in chunks (+fl)"
    if layout.expert > 1 and not target.experts:
        return f"has no option for {layout.expert}-way expert parallelism"
    return target.more(layout, model)


def notes_to_programs(model: ModelSpec, *, recomputes: bool) -> Iterator[str]:
    """What a program itself must do, for a system whose file says nothing of the model."""
    if recomputes:
        yield "the plan recomputes all blocks: call model.gradient_checkpointing_enable()"
    if model.training.compile:
        yield (
            "the plan was priced with compiled blocks: call block.compile() on each, or expect less throughput and "
            "more memory"
        )
    if model.training.tunes:
        yield "the plan freezes parameters: freeze the same ones"
