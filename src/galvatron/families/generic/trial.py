"""A trial run of an unknown model: which list are its blocks, what runs before and after, and whether it can be cut."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.stubs import Call, StubbedModel, Unit, find_units, has_nan
from galvatron.families.layer import Batch

__all__ = ["Anatomy", "find_blocks"]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a trial run found out about a model."""

    blocks: str
    """Name of the list of blocks."""
    count: int
    hidden_argument: int | str
    """Where a block takes the hidden state: its first argument, or a keyword."""
    extra: tuple[Any, ...] | None
    """What a block returns after the hidden state; None: it returns that alone."""
    units: tuple[Unit, ...]
    before: tuple[str, ...]
    """Names of the units that run before the blocks, and of the idle ones."""
    after: tuple[str, ...]
    idle: tuple[str, ...]
    """Units that such batches do not use (the vision tower of a model that reads text); they must be in checkpoints."""
    inputs: frozenset[str]
    """What the model's forward takes, apart from labels."""

    def modules(self, names: tuple[str, ...]) -> dict[str, tuple[str, nn.Module]]:
        """These units in the form that a layer takes."""
        found = {unit.name: unit.module for unit in self.units}
        return {name.replace(".", "_"): (name, found[name]) for name in names}

    def pick(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs in a batch."""
        return {name: own for name, own in batch.items() if name in self.inputs}

    def hidden(self, call: Call) -> Any:
        """The hidden state that a block was called with."""
        return (
            call.kwargs[self.hidden_argument]
            if isinstance(self.hidden_argument, str)
            else call.args[self.hidden_argument]
        )

    def wrap(self, hidden: Tensor) -> Any:
        """What a block returns if this is its hidden state."""
        return hidden if self.extra is None else (hidden, *self.extra)


class _Unfit(Exception):
    """Why a list is not the model's blocks."""


def find_blocks(model: nn.Module, batch: Batch) -> Anatomy:
    """The longest list of modules that runs as a chain."""
    taken = frozenset(inspect.signature(model.forward).parameters) - {"labels"}
    dtype = next((own.dtype for own in model.parameters() if own.is_floating_point()), torch.float32)
    inputs = {key: own for key, own in batch.items() if key in taken}
    reasons = []
    for name, blocks in _candidates(model):
        try:
            anatomy = _examine(model, name, blocks, inputs, dtype, taken)
        except _Unfit as reason:
            reasons.append(f"{name} ({reason})")
        except Exception as error:  # of whatever kind: it comes from the stock model's own forward
            said = str(error).strip().partition(chr(10))[0]
            reasons.append(f"{name} (the trial run failed with {type(error).__name__}: {said})")
        else:
            _refuse_batch_norm(model, anatomy)
            return anatomy
    _refuse_batch_norm(model)
    kind = type(model).__name__
    if not reasons:
        raise InvalidInput(f"{kind}: has no nn.ModuleList of blocks, which the generic cut needs")
    raise InvalidInput(f"{kind}: cannot be cut into layers; of its lists, " + "; ".join(reasons))


def _refuse_batch_norm(model: nn.Module, anatomy: Anatomy | None = None) -> None:
    """Its statistics are those of the rows that come together: a micro-batch's on one rank, not the batch's. What the
    batch does not use may have one."""
    used = ("",) if anatomy is None else (*anatomy.before, *anatomy.after, anatomy.blocks)
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


def _examine(
    model: nn.Module,
    name: str,
    blocks: nn.ModuleList,
    inputs: dict[str, Tensor],
    dtype: torch.dtype,
    taken: frozenset[str],
) -> Anatomy:
    units = find_units(model, name)
    stubbed = StubbedModel(model, name, units)
    stubbed.note_uses = True
    returned: list[Tensor] = []
    sample: list[Tensor] = []
    extra: tuple[Any, ...] | None = None

    def chain(call: Call) -> Any:
        nonlocal extra
        if not returned:
            made = _result_of_block(stubbed, call, blocks)
            sample.append(_hidden_of(made))
            if not isinstance(made, Tensor):
                extra = tuple(None if isinstance(own, Tensor) else own for own in made[1:])
        returned.append(torch.zeros(sample[0].shape, dtype=sample[0].dtype))
        return returned[-1] if extra is None else (returned[-1], *extra)

    stubbed.on_block = chain
    stubbed.watched = frozenset(unit.name for unit in units)
    parts = _parts(stubbed)
    with torch.no_grad():
        stubbed.run(inputs, dtype, training=model.training)
    if _parts(stubbed) != parts:
        raise _Unfit("the model's own forward replaces parts of them, depending on the batch")
    calls = stubbed.log.calls
    if [call.block for call in calls] != list(range(len(blocks))):
        raise _Unfit("its modules do not run once each in order")
    hidden_argument = _hidden_argument(calls, returned)
    _check_shape(calls[0], hidden_argument, sample[0])
    if stubbed.log.outside:
        raise _Unfit(f"a weight of {stubbed.log.outside[0]} is used outside of it")
    before, after = _phases(stubbed, len(blocks))
    idle = {unit.name for unit in units} - before - after
    anatomy = Anatomy(
        blocks=name,
        count=len(blocks),
        hidden_argument=hidden_argument,
        extra=extra,
        units=units,
        before=_in_order(units, before | idle),
        after=_in_order(units, after),
        idle=_in_order(units, idle),
        inputs=taken,
    )
    _check_arguments(anatomy, StubbedModel(model, name, units), inputs, dtype)
    _check_after(anatomy, StubbedModel(model, name, units), inputs, dtype)
    return anatomy


def _parts(stubbed: StubbedModel) -> list[tuple[str, type[nn.Module]]]:
    return [(name, type(own)) for block in stubbed.blocks for name, own in block.named_modules()]


def _hidden_of(made: Any) -> Tensor:
    """The hidden state in what a block returned."""
    found = made[0] if isinstance(made, tuple | list) and made else made
    if not isinstance(found, Tensor):
        raise _Unfit(f"its modules return a {type(made).__name__} instead of a hidden state")
    return found


def _check_shape(call: Call, hidden_argument: int | str, made: Tensor) -> None:
    """All blocks pass on what has one shape: it is what travels between stages."""
    given = call.kwargs[hidden_argument] if isinstance(hidden_argument, str) else call.args[hidden_argument]
    if given.shape != made.shape:
        before, after = list(given.shape), list(made.shape)
        raise _Unfit(f"its modules change the shape of the hidden state, from {before} to {after}")


def _result_of_block(stubbed: StubbedModel, call: Call, blocks: nn.ModuleList) -> Any:
    """What the first block returns; where it cannot run without values (experts look at them), with weights of zero."""
    try:
        return stubbed.shapes_of_block(call)
    except (RuntimeError, NotImplementedError):
        block = copy.deepcopy(blocks[0])
        block = block.to_empty(device="cpu") if any(own.is_meta for own in block.parameters()) else block.cpu()
        for own in block.parameters():
            nn.init.zeros_(own)
        return block(*call.args, **call.kwargs)


def _hidden_argument(calls: list[Call], returned: list[Tensor]) -> int | str:
    """Where blocks take the hidden state: each must get the very tensor that the one before returned."""
    found: set[int | str] = set()
    for call, received in zip(calls[1:], returned, strict=False):
        places = [index for index, own in enumerate(call.args) if own is received]
        found |= {*places[:1], *(key for key, own in call.kwargs.items() if own is received)}
    if len(calls) == 1:
        found = {0} if calls[0].args else {key for key, own in calls[0].kwargs.items() if key == "hidden_states"}
    slots = [hidden_argument for hidden_argument in found if hidden_argument == 0 or isinstance(hidden_argument, str)]
    if len(slots) != 1:
        raise _Unfit("a block does not take what the one before it returned")
    return slots[0]


def _phases(stubbed: StubbedModel, count: int) -> tuple[set[str], set[str]]:
    before = {name for name, called in stubbed.log.used if called == 0}
    after = {name for name, called in stubbed.log.used if called == count}
    between = {name for name, called in stubbed.log.used if 0 < called < count}
    if between:
        raise _Unfit(f"{sorted(between)[0]} runs between its modules")
    if before & after:
        raise _Unfit(f"{sorted(before & after)[0]} runs both before and after its modules")
    return before, after


def _in_order(units: tuple[Unit, ...], names: set[str]) -> tuple[str, ...]:
    return tuple(unit.name for unit in units if unit.name in names)


def _check_arguments(anatomy: Anatomy, stubbed: StubbedModel, inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """What blocks get besides the hidden state must not depend on weights: each stage makes it for itself."""
    stubbed.on_block = lambda call: anatomy.wrap(anatomy.hidden(call))
    with torch.no_grad():
        stubbed.run(inputs, dtype, training=False)
    for call in stubbed.log.calls:
        for place, own in (*enumerate(call.args), *call.kwargs.items()):
            if place != anatomy.hidden_argument and has_nan(own):
                raise _Unfit(
                    f"argument {place!r} of its modules is computed with weights, as in encoder-decoder models"
                )


def _check_after(anatomy: Anatomy, stubbed: StubbedModel, inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """What comes after the blocks must use nothing of what came before but the hidden state."""
    stubbed.watched = frozenset(anatomy.after)
    stubbed.on_block = lambda call: anatomy.wrap(torch.zeros_like(anatomy.hidden(call)))
    with torch.no_grad():
        output = stubbed.run(inputs, dtype, training=False)
    if has_nan(list(_tensors(output))):
        raise _Unfit("what follows uses more of what precedes than the hidden state")


def _tensors(output: Any) -> Iterator[Tensor]:
    leaves = tree_flatten(dict(output) if hasattr(output, "keys") else output)[0]
    return (own for own in leaves if isinstance(own, Tensor))
