"""A trial run of an unknown model: which lists are its blocks, what runs around them, and whether it can be cut."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.borders import (
    BlockList,
    Trial,
    Unfit,
    check_after,
    check_between,
    check_buffers,
    with_arguments,
)
from galvatron.families.generic.images import PIXELS
from galvatron.families.generic.reach import Reach, find_reach
from galvatron.families.generic.segments import Anatomy, Segment
from galvatron.families.generic.stubs import StubbedModel, Unit, find_units
from galvatron.families.layer import Batch

__all__ = ["find_blocks"]

_MOST_PAIRS, _MOST_TOWERS = 6, 3
"""Of lists that are tried."""


def find_blocks(model: nn.Module, batch: Batch) -> Anatomy:
    """The longest list of modules that runs as a chain; of a model with an encoder and a decoder, two lists."""
    taken = frozenset(inspect.signature(model.forward).parameters) - {"labels"}
    dtype = next((own.dtype for own in model.parameters() if own.is_floating_point()), torch.float32)
    trial = Trial(model, {key: own for key, own in batch.items() if key in taken}, dtype, taken)
    reasons = []
    for names in _choices(model, trial.images):
        try:
            anatomy = _examine(trial, names)
        except Unfit as reason:
            reasons.append(f"{' and '.join(names)} ({reason})")
        except Exception as error:  # of whatever kind: it comes from the stock model's own forward
            said = str(error).strip().partition(chr(10))[0]
            reasons.append(f"{' and '.join(names)} (the trial run failed with {type(error).__name__}: {said})")
        else:
            _refuse_batch_norm(model, anatomy)
            return anatomy
    _refuse_batch_norm(model)
    if not reasons:
        raise InvalidInput(f"{type(model).__name__}: has no nn.ModuleList of blocks, which the generic cut needs")
    raise InvalidInput(f"{type(model).__name__}: cannot be cut into layers; of its lists, " + "; ".join(reasons))


def _refuse_batch_norm(model: nn.Module, anatomy: Anatomy | None = None) -> None:
    """Its statistics are those of the rows that come together: a micro-batch's on one rank, not the batch's. What the
    batch does not use may have one."""
    used = ("",) if anatomy is None else (*anatomy.running, *anatomy.lists)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and f"{name}.".startswith(tuple(used)):
            raise InvalidInput(
                f"{type(model).__name__}: {name} is a {type(module).__name__}, whose statistics would be those of one "
                "rank's part of a micro-batch instead of the batch's; such a model cannot be divided and stay the same"
            )


def _candidates(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Lists of modules, the longest first; lists within lists are parts of blocks and come last."""
    lists = {name: own for name, own in model.named_modules() if isinstance(own, nn.ModuleList) and len(own)}
    nested = {name for name in lists if any(name.startswith(f"{other}.") for other in lists)}
    found = [(name, own) for name, own in lists.items() if len(own) > 1 or name not in nested]
    return sorted(found, key=lambda entry: (entry[0] in nested, -len(entry[1])))


def _choices(model: Any, images: bool) -> list[tuple[str, ...]]:
    """Lists that may be the model's blocks, the likeliest first. Of an encoder alone the decoder would be the head.
    ``images``: whether they are read beside text. Then a vision tower that cannot be cut is part of the first layer."""
    found = _candidates(model)
    if images and not model.config.is_encoder_decoder:
        text = set(model.get_decoder().modules()) if hasattr(model, "get_decoder") else set()
        names = [name for name, own in found if own in text]
        seen = [name for name, own in found if own not in text and len(own) > 1]
        if names:
            return [*((name, names[0]) for name in seen[:_MOST_TOWERS]), *((name,) for name in names)]
    single: list[tuple[str, ...]] = [(name,) for name, _ in found]
    lengths = {name: len(own) for name, own in found if not any(name.startswith(f"{other}.") for other, _ in found)}
    order = [name for name, _ in model.named_modules() if name in lengths]
    pairs: list[tuple[str, ...]] = sorted(combinations(order, 2), key=lambda pair: -sum(lengths[name] for name in pair))
    if pairs and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return pairs[:_MOST_PAIRS]
    return single if type(model).__module__.startswith("transformers.") else pairs[:_MOST_PAIRS] + single


def _examine(trial: Trial, names: tuple[str, ...]) -> Anatomy:
    model = trial.model
    units = find_units(model, names)
    lists: list[BlockList] = []
    for name in names:
        lists.append(BlockList(name, sum(len(own.blocks) for own in lists), list(model.get_submodule(name).children())))
    stubbed = StubbedModel(model, names, units)
    stubbed.note_uses = True
    stubbed.on_block = lambda call: next(own for own in reversed(lists) if own.first <= call.block).result(
        stubbed, call
    )
    stubbed.watched = frozenset(unit.name for unit in units)
    parts = _parts(stubbed)
    trial.run(stubbed, training=model.training)
    if _parts(stubbed) != parts:
        raise Unfit("the model's own forward replaces parts of them, depending on the batch")
    calls = stubbed.log.calls
    if [call.block for call in calls] != list(range(len(stubbed.blocks))):
        raise Unfit("its modules do not run once each in order")
    segments = tuple(own.segment(calls) for own in lists)
    if len(segments) > 1 and not trial.images:
        _check_rows([own.hidden for own in lists], len(next(iter(trial.inputs.values()))))
    elif len(segments) > 1:
        _check_entries([own.hidden for own in lists], trial.inputs)
        segments = (replace(segments[0], entries=True), *segments[1:])
    if stubbed.log.outside:
        raise Unfit(f"a weight of {stubbed.log.outside[0]} is used outside of it")
    phases = _phases(stubbed, segments)
    idle = _idle(units, set().union(*phases), lists)
    if trial.images:
        reach = find_reach(model, segments, units, trial.inputs, trial.dtype)
        segments, phases = _by_need(segments, phases, reach)
        idle |= set().union(*phases) - reach.units
        phases = [own - idle for own in phases]
    anatomy = Anatomy(
        segments=segments,
        units=units,
        around=tuple(_in_order(units, own | idle if place == 0 else own) for place, own in enumerate(phases)),
        idle=_in_order(units, idle),
        inputs=trial.taken,
    )
    anatomy = replace(anatomy, segments=with_arguments(anatomy, trial, lists))
    for place in range(1, len(segments)):
        check_between(anatomy, trial, place)
    check_after(anatomy, trial)
    check_buffers(anatomy, trial)
    return anatomy


def _by_need(
    segments: tuple[Segment, ...], phases: list[set[str]], reach: Reach
) -> tuple[tuple[Segment, ...], list[set[str]]]:
    """Segments without the last blocks that nobody needs; units where they are needed first: the embedding of the text
    runs before the vision tower, whose blocks do not need it."""
    found = []
    for segment in segments:
        used = [block for block in range(segment.first, segment.last + 1) if block in reach.blocks]
        if not used:
            raise Unfit("its modules have no part in the result")
        found.append(replace(segment, unused=segment.last - used[-1]))
    moved = [set(own) for own in phases]
    for place in range(len(segments)):
        late = (moved[place] & reach.units) - reach.before[place]
        if late and place == len(segments) - 1:
            raise Unfit(f"{sorted(late)[0]} runs before its modules, but not for what the first of them takes")
        moved[place] -= late
        moved[place + 1] |= late
    return tuple(found), moved


def _idle(units: tuple[Unit, ...], used: set[str], lists: Sequence[BlockList]) -> set[str]:
    """Units that did not run, but for those that are only another name of weights that others use (an embedding that
    encoder and decoder share)."""
    running = [unit.module for unit in units if unit.name in used] + [block for own in lists for block in own.blocks]
    owned = {id(own) for module in running for own in module.parameters()}
    others = (unit for unit in units if unit.name not in used)
    return {unit.name for unit in others if any(id(own) not in owned for own in unit.module.parameters())}


def _parts(stubbed: StubbedModel) -> list[tuple[str, type[nn.Module]]]:
    return [(name, type(own)) for block in stubbed.blocks for name, own in block.named_modules()]


def _check_rows(hidden: Sequence[Tensor], rows: int) -> None:
    """Stages pass on samples: they must come first in each tensor."""
    for own in hidden:
        if own.shape[0] != rows:
            raise Unfit(
                f"its hidden states have the shape {list(own.shape)}, in which the {rows} samples do not come first"
            )


def _check_entries(hidden: Sequence[Tensor], inputs: Batch) -> None:
    """A vision tower's blocks work on the entries of pixel_values, the others on samples."""
    entries = len(inputs[PIXELS])
    if hidden[0].shape[0] != entries:
        raise Unfit(f"its hidden states are {list(hidden[0].shape)}, in which the {entries} images do not come first")
    _check_rows(hidden[1:], len(inputs["input_ids"]))


def _phases(stubbed: StubbedModel, segments: Sequence[Segment]) -> list[set[str]]:
    """The units that run before the first list, between lists, and after the last."""
    places = [*(segment.first for segment in segments), segments[-1].last + 1]
    phases = [{name for name, called in stubbed.log.used if called == place} for place in places]
    between = {name for name, called in stubbed.log.used if called not in places}
    if between:
        raise Unfit(f"{sorted(between)[0]} runs between its modules")
    for one, other in combinations(phases, 2):
        if one & other:
            raise Unfit(f"{sorted(one & other)[0]} runs both before and after its modules")
    return phases


def _in_order(units: tuple[Unit, ...], names: set[str]) -> tuple[str, ...]:
    return tuple(unit.name for unit in units if unit.name in names)
