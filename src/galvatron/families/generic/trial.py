"""A trial run of an unknown model: which lists are its blocks, what runs around them, and whether it can be cut."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from galvatron.core.errors import InvalidInput
from galvatron.families.generic.segments import Anatomy, Segment
from galvatron.families.generic.stubs import Call, Stop, StubbedModel, Unit, find_units, has_nan
from galvatron.families.layer import Batch
from galvatron.families.weights import persistent_buffers

__all__ = ["find_blocks"]

_MOST_PAIRS = 6
"""Of lists that are tried."""


class _Unfit(Exception):
    """Why a list is not the model's blocks."""


def find_blocks(model: nn.Module, batch: Batch) -> Anatomy:
    """The longest list of modules that runs as a chain; of a model with an encoder and a decoder, two lists."""
    taken = frozenset(inspect.signature(model.forward).parameters) - {"labels"}
    dtype = next((own.dtype for own in model.parameters() if own.is_floating_point()), torch.float32)
    trial = _Trial(model, {key: own for key, own in batch.items() if key in taken}, dtype, taken)
    reasons = []
    for names in _choices(model):
        try:
            anatomy = _examine(trial, names)
        except _Unfit as reason:
            reasons.append(f"{' and '.join(names)} ({reason})")
        except Exception as error:  # of whatever kind: it comes from the stock model's own forward
            said = str(error).strip().partition(chr(10))[0]
            reasons.append(f"{' and '.join(names)} (the trial run failed with {type(error).__name__}: {said})")
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


def _choices(model: nn.Module) -> list[tuple[str, ...]]:
    """Lists that may be the model's blocks, the likeliest first. Of an encoder alone the decoder would be the head."""
    found = _candidates(model)
    single: list[tuple[str, ...]] = [(name,) for name, _ in found]
    lengths = {name: len(own) for name, own in found if not any(name.startswith(f"{other}.") for other, _ in found)}
    order = [name for name, _ in model.named_modules() if name in lengths]
    pairs: list[tuple[str, ...]] = sorted(combinations(order, 2), key=lambda pair: -sum(lengths[name] for name in pair))
    if pairs and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return pairs[:_MOST_PAIRS]
    return single if type(model).__module__.startswith("transformers.") else pairs[:_MOST_PAIRS] + single


@dataclass(frozen=True, slots=True)
class _Trial:
    """What is tried out."""

    model: nn.Module
    inputs: dict[str, Tensor]
    dtype: torch.dtype
    taken: frozenset[str]
    """What the model's forward takes, apart from labels."""

    def run(self, stubbed: StubbedModel, *, training: bool = False) -> Any:
        with torch.no_grad():
            return stubbed.run(self.inputs, self.dtype, training=training)


@dataclass(slots=True)
class _List:
    """A list of blocks as its trial run fills it in."""

    name: str
    first: int
    blocks: list[nn.Module]
    made: Any = None
    """What its first block returned, without values."""
    returned: list[Tensor] = field(default_factory=list)

    @property
    def hidden(self) -> Tensor:
        return _hidden_of(self.made)

    @property
    def extra(self) -> tuple[Any, ...] | None:
        if isinstance(self.made, Tensor):
            return None
        return tuple(None if isinstance(own, Tensor) else own for own in self.made[1:])

    def result(self, stubbed: StubbedModel, call: Call) -> Any:
        """What a block's stand-in returns: as its first block does, of zeros."""
        if not self.returned:
            self.made = _result_of_block(stubbed, call, self.blocks[0])
        self.returned.append(torch.zeros(self.hidden.shape, dtype=self.hidden.dtype))
        return self.returned[-1] if self.extra is None else (self.returned[-1], *self.extra)

    def segment(self, calls: Sequence[Call]) -> Segment:
        own = calls[self.first : self.first + len(self.blocks)]
        hidden_argument = _hidden_argument(own, self.returned)
        _check_shape(own[0], hidden_argument, self.hidden)
        return Segment(self.name, self.first, len(self.blocks), hidden_argument, self.extra)


def _examine(trial: _Trial, names: tuple[str, ...]) -> Anatomy:
    model = trial.model
    units = find_units(model, names)
    lists: list[_List] = []
    for name in names:
        lists.append(_List(name, sum(len(own.blocks) for own in lists), list(model.get_submodule(name).children())))
    stubbed = StubbedModel(model, names, units)
    stubbed.note_uses = True
    stubbed.on_block = lambda call: next(own for own in reversed(lists) if own.first <= call.block).result(
        stubbed, call
    )
    stubbed.watched = frozenset(unit.name for unit in units)
    parts = _parts(stubbed)
    trial.run(stubbed, training=model.training)
    if _parts(stubbed) != parts:
        raise _Unfit("the model's own forward replaces parts of them, depending on the batch")
    calls = stubbed.log.calls
    if [call.block for call in calls] != list(range(len(stubbed.blocks))):
        raise _Unfit("its modules do not run once each in order")
    segments = tuple(own.segment(calls) for own in lists)
    if len(segments) > 1:
        _check_rows([own.hidden for own in lists], len(next(iter(trial.inputs.values()))))
    if stubbed.log.outside:
        raise _Unfit(f"a weight of {stubbed.log.outside[0]} is used outside of it")
    phases = _phases(stubbed, segments)
    idle = _idle(units, set().union(*phases), lists)
    anatomy = Anatomy(
        segments=segments,
        units=units,
        around=tuple(_in_order(units, own | idle if place == 0 else own) for place, own in enumerate(phases)),
        idle=_in_order(units, idle),
        inputs=trial.taken,
    )
    anatomy = replace(anatomy, segments=_with_arguments(anatomy, trial, lists))
    for place in range(1, len(segments)):
        _check_between(anatomy, trial, place)
    _check_after(anatomy, trial)
    _check_buffers(anatomy, trial)
    return anatomy


def _idle(units: tuple[Unit, ...], used: set[str], lists: Sequence[_List]) -> set[str]:
    """Units that did not run, but for those that are only another name of weights that others use (an embedding that
    encoder and decoder share)."""
    running = [unit.module for unit in units if unit.name in used] + [block for own in lists for block in own.blocks]
    owned = {id(own) for module in running for own in module.parameters()}
    others = (unit for unit in units if unit.name not in used)
    return {unit.name for unit in others if any(id(own) not in owned for own in unit.module.parameters())}


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


def _check_rows(hidden: Sequence[Tensor], rows: int) -> None:
    """Stages pass on samples: they must come first in each tensor."""
    for own in hidden:
        if own.shape[0] != rows:
            shape = list(own.shape)
            raise _Unfit(f"its hidden states have the shape {shape}, in which the {rows} samples do not come first")


def _result_of_block(stubbed: StubbedModel, call: Call, first: nn.Module) -> Any:
    """What the first block returns; where it cannot run without values (experts look at them), with weights of zero."""
    try:
        return stubbed.shapes_of_block(call)
    except (RuntimeError, NotImplementedError):
        block = copy.deepcopy(first)
        block = block.to_empty(device="cpu") if any(own.is_meta for own in block.parameters()) else block.cpu()
        for own in block.parameters():
            nn.init.zeros_(own)
        return block(*call.args, **call.kwargs)


def _hidden_argument(calls: Sequence[Call], returned: Sequence[Tensor]) -> int | str:
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


def _phases(stubbed: StubbedModel, segments: Sequence[Segment]) -> list[set[str]]:
    """The units that run before the first list, between lists, and after the last."""
    places = [*(segment.first for segment in segments), segments[-1].last + 1]
    phases = [{name for name, called in stubbed.log.used if called == place} for place in places]
    between = {name for name, called in stubbed.log.used if called not in places}
    if between:
        raise _Unfit(f"{sorted(between)[0]} runs between its modules")
    for one, other in combinations(phases, 2):
        if one & other:
            raise _Unfit(f"{sorted(one & other)[0]} runs both before and after its modules")
    return phases


def _in_order(units: tuple[Unit, ...], names: set[str]) -> tuple[str, ...]:
    return tuple(unit.name for unit in units if unit.name in names)


def _with_arguments(anatomy: Anatomy, trial: _Trial, lists: Sequence[_List]) -> tuple[Segment, ...]:
    """What blocks get besides the hidden state must not depend on weights: each stage makes it for itself. But for one
    tensor that was made before the first of them, which travels too."""
    stubbed = StubbedModel(trial.model, anatomy.lists, anatomy.units)
    extras = [_nans(own) for own in lists]

    def passed(call: Call) -> Any:
        place = anatomy.segments.index(anatomy.segment(call.block))
        hidden = anatomy.hidden(call)
        return hidden if extras[place] is None else (hidden, *extras[place])

    def needed(call: Call, place: int | str) -> bool:
        """Whether it has values that were computed, or the block fails without it (attention to the same tokens as the
        block before). Some take it and make their own."""
        if has_nan(call.argument(place)):
            return True
        try:
            stubbed.shapes_of_block(call.given({place: None}))
        except (ValueError, TypeError, AttributeError, KeyError, AssertionError):
            return True
        except (RuntimeError, NotImplementedError):  # it looks at values, of which there are none
            return False
        return False

    stubbed.on_block = passed
    trial.run(stubbed)
    found = []
    for segment, own in zip(anatomy.segments, extras, strict=True):
        calls = [call for call in stubbed.log.calls if segment.first <= call.block <= segment.last]
        found.append(replace(segment, handed=_handed(segment, calls, own, needed)))
    return tuple(found)


def _nans(own: _List) -> Any:
    """What a block returns after the hidden state, with NaNs for values that were computed with weights, and zeros for
    whole numbers (which tokens it attended to)."""
    if own.extra is None:
        return None
    return tuple(
        torch.full(made.shape, torch.nan if made.is_floating_point() else 0, dtype=made.dtype)
        if isinstance(made, Tensor)
        else extra
        for made, extra in zip(own.made[1:], own.extra, strict=True)
    )


def _handed(
    segment: Segment, calls: Sequence[Call], extra: Any, needed: Callable[[Call, int | str], bool]
) -> tuple[int | str, ...]:
    """Where blocks take the tensor that is handed to all of them; ``needed``: whether a block needs an argument."""
    found: dict[int | str, Any] = {}
    for call in calls:
        for place, own in call.arguments.items():
            if place == segment.hidden_argument:
                continue
            if isinstance(own, Tensor) and any(own is other for other in extra or ()) and needed(call, place):
                raise _Unfit(
                    f"argument {place!r} of its modules is what the one before returned besides the hidden state, and "
                    "would have to travel too"
                )
            if not has_nan(own):
                continue
            tensor = next(iter(found.values()), own)
            if segment.first == 0 or not isinstance(own, Tensor) or own is not tensor:
                raise _Unfit(f"argument {place!r} of its modules is computed with weights")
            found[place] = own
    for call in calls:
        given = call.arguments
        if any(given.get(place) is not own for place, own in found.items()):
            raise _Unfit("not all of its modules take the tensor that was made before them, or not in the same place")
    return tuple(found)


def _check_between(anatomy: Anatomy, trial: _Trial, place: int) -> None:
    """What comes between two lists must use nothing of what came before but the hidden state."""
    stubbed = StubbedModel(trial.model, anatomy.lists, anatomy.units)
    stubbed.watched = frozenset(anatomy.around[place])
    before, after = anatomy.segments[place - 1 : place + 1]
    made: list[Tensor] = []

    def enter(call: Call) -> Any:
        if call.block == after.first:
            made.extend(after.activations(call))
            raise Stop
        hidden = anatomy.hidden(call)
        return anatomy.returned(call, torch.zeros_like(hidden) if call.block == before.last else hidden)

    stubbed.on_block = enter
    trial.run(stubbed)
    if has_nan(made):
        raise _Unfit(f"{after.blocks} use more of what precedes {before.blocks} than the hidden state")


def _check_after(anatomy: Anatomy, trial: _Trial) -> None:
    """What comes after the blocks must use nothing of what came before but the hidden state."""
    stubbed = StubbedModel(trial.model, anatomy.lists, anatomy.units)
    stubbed.watched = frozenset(anatomy.around[-1])
    last = anatomy.segments[-1]

    def zeros(call: Call) -> Any:
        hidden = anatomy.hidden(call)
        return anatomy.returned(call, torch.zeros_like(hidden) if call.block >= last.first else hidden)

    stubbed.on_block = zeros
    if has_nan(list(_tensors(trial.run(stubbed)))):
        raise _Unfit("what follows uses more of what precedes than the hidden state")


def _check_buffers(anatomy: Anatomy, trial: _Trial) -> None:
    """No statistics may be kept of what comes around the blocks: they would be those of a rank's part of a batch."""
    stubbed = StubbedModel(trial.model, anatomy.lists, anatomy.units)
    stubbed.noise = torch.Generator().manual_seed(0)
    stubbed.on_block = anatomy.passed
    before = {name: own.clone() for name, own in persistent_buffers(stubbed.model).items() if not own.is_meta}
    if before:
        trial.run(stubbed, training=True)
    after = persistent_buffers(stubbed.model)
    changed = [name for name, own in before.items() if not torch.equal(own, after[name])]
    if changed:
        raise _Unfit(
            f"the model's own forward changes {changed[0]}, by statistics of a batch, of which a rank has a part"
        )


def _tensors(output: Any) -> Iterator[Tensor]:
    """Those in what a model returned, but for what it says of its encoder."""
    if hasattr(output, "keys"):
        output = {name: own for name, own in dict(output).items() if not str(name).startswith("encoder_")}
    return (own for own in tree_flatten(output)[0] if isinstance(own, Tensor))
