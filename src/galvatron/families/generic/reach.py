"""What a model's result depends on: one run of a stubbed model in which autograd follows each module's stand-in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from galvatron.families.generic.segments import Segment
from galvatron.families.generic.stubs import Call, StubbedModel, Unit, depending

__all__ = ["Reach", "find_reach", "result_tensors"]


@dataclass(frozen=True, slots=True)
class Reach:
    """Names of units, and numbers of blocks, that tensors depend on."""

    before: tuple[frozenset[str], ...]
    """For each list: the units that its first block's arguments depend on."""
    units: frozenset[str]
    """Those that the result depends on."""
    blocks: frozenset[int]
    """Those that the result depends on."""


def find_reach(
    model: nn.Module,
    segments: Sequence[Segment],
    units: Sequence[Unit],
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Reach:
    """What the first block of each list, and the model's result, depend on."""
    stubbed = StubbedModel(model, [segment.blocks for segment in segments], units)
    stubbed.tags = {unit.name: _tag() for unit in units}
    tags = [_tag() for _ in stubbed.blocks]
    firsts = [segment.first for segment in segments]
    entered: dict[int, list[Tensor]] = {}

    def pass_on(call: Call) -> Any:
        given = [own for own in tree_flatten((call.args, call.kwargs))[0] if isinstance(own, Tensor)]
        if call.block in firsts:
            entered[call.block] = given
        segment = next(own for own in segments if call.block <= own.last)
        return segment.wrap(depending(torch.zeros_like(segment.hidden(call)), (tags[call.block], given)))

    stubbed.on_block = pass_on
    with torch.enable_grad():
        output = stubbed.run(inputs, dtype, training=model.training)
    logits = getattr(output, "logits", None)
    result = [logits] if isinstance(logits, Tensor) else tree_flatten(output)[0]
    reached = _reached(result, [*stubbed.tags.values(), *tags])
    names = list(stubbed.tags)
    return Reach(
        before=tuple(_named(names, _reached(entered.get(first, []), list(stubbed.tags.values()))) for first in firsts),
        units=_named(names, reached[: len(names)]),
        blocks=frozenset(number for number, found in enumerate(reached[len(names) :]) if found),
    )


def _tag() -> Tensor:
    return torch.zeros((), requires_grad=True)


def _reached(results: Sequence[Any], tags: Sequence[Tensor]) -> list[bool]:
    sums = [own.sum() for own in results if isinstance(own, Tensor) and own.requires_grad]
    if not sums:
        return [False] * len(tags)
    total = torch.stack([own.float() for own in sums]).sum()
    found = torch.autograd.grad(total, tags, allow_unused=True, retain_graph=True)
    return [own is not None for own in found]


def _named(names: Sequence[str], reached: Sequence[bool]) -> frozenset[str]:
    return frozenset(name for name, found in zip(names, reached, strict=True) if found)


def result_tensors(output: Any) -> Iterator[Tensor]:
    """Those in what a model returned, but for what it says of its encoder and of images."""
    if hasattr(output, "keys"):
        output = {name: own for name, own in dict(output).items() if not str(name).startswith(("encoder_", "image_"))}
    return (own for own in tree_flatten(output)[0] if isinstance(own, Tensor))
