"""What crosses the borders of a list of blocks: what each block takes besides the hidden state, and whether anything
passes by it that a cut would lose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.families.generic.images import PIXELS
from galvatron.families.generic.reach import result_tensors
from galvatron.families.generic.segments import Anatomy, Segment
from galvatron.families.generic.stubs import Call, Stop, StubbedModel, has_nan
from galvatron.families.weights import persistent_buffers

__all__ = ["BlockList", "Trial", "Unfit", "check_after", "check_between", "check_buffers", "with_arguments"]


class Unfit(Exception):
    """Why a list is not the model's blocks."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried out."""

    model: nn.Module
    inputs: dict[str, Tensor]
    dtype: torch.dtype
    taken: frozenset[str]
    """What the model's forward takes, apart from labels."""

    @property
    def images(self) -> bool:
        """Whether images are read beside text."""
        return PIXELS in self.inputs and "input_ids" in self.inputs

    def run(self, stubbed: StubbedModel, *, training: bool = False) -> Any:
        with torch.no_grad():
            return stubbed.run(self.inputs, self.dtype, training=training)


@dataclass(slots=True)
class BlockList:
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


def with_arguments(anatomy: Anatomy, trial: Trial, lists: Sequence[BlockList]) -> tuple[Segment, ...]:
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


def _nans(own: BlockList) -> Any:
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
                raise Unfit(
                    f"argument {place!r} of its modules is what the one before returned besides the hidden state, and "
                    "would have to travel too"
                )
            if not has_nan(own):
                continue
            tensor = next(iter(found.values()), own)
            if segment.first == 0 or not isinstance(own, Tensor) or own is not tensor:
                raise Unfit(f"argument {place!r} of its modules is computed with weights")
            found[place] = own
    for call in calls:
        given = call.arguments
        if any(given.get(place) is not own for place, own in found.items()):
            raise Unfit("not all of its modules take the tensor that was made before them, or not in the same place")
    return tuple(found)


def check_between(anatomy: Anatomy, trial: Trial, place: int) -> None:
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
        return anatomy.returned(call, torch.zeros_like(hidden) if call.block == before.last_used else hidden)

    stubbed.on_block = enter
    trial.run(stubbed)
    if has_nan(made):
        raise Unfit(f"{after.blocks} use more of what precedes {before.blocks} than the hidden state")


def check_after(anatomy: Anatomy, trial: Trial) -> None:
    """What comes after the blocks must use nothing of what came before but the hidden state."""
    stubbed = StubbedModel(trial.model, anatomy.lists, anatomy.units)
    stubbed.watched = frozenset(anatomy.around[-1])
    last = anatomy.segments[-1]

    def zeros(call: Call) -> Any:
        hidden = anatomy.hidden(call)
        return anatomy.returned(call, torch.zeros_like(hidden) if call.block >= last.first else hidden)

    stubbed.on_block = zeros
    if has_nan(list(result_tensors(trial.run(stubbed)))):
        raise Unfit("what follows uses more of what precedes than the hidden state")


def check_buffers(anatomy: Anatomy, trial: Trial) -> None:
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
        raise Unfit(
            f"the model's own forward changes {changed[0]}, by statistics of a batch, of which a rank has a part"
        )


def _hidden_of(made: Any) -> Tensor:
    """The hidden state in what a block returned."""
    found = made[0] if isinstance(made, tuple | list) and made else made
    if not isinstance(found, Tensor):
        raise Unfit(f"its modules return a {type(made).__name__} instead of a hidden state")
    return found


def _result_of_block(stubbed: StubbedModel, call: Call, first: nn.Module) -> Any:
    """What the first block returns; where it cannot run without values (experts look at them), with weights of zero."""
    try:
        return stubbed.shapes_of_block(call)
    except (RuntimeError, NotImplementedError):
        block = copy.deepcopy(first)
        if any(own.is_meta for own in block.parameters()):
            block = block.to_empty(device="cpu")
            for buffer in block.buffers():  # a table of experts must not hold what was in memory
                nn.init.zeros_(buffer)
        block = block.cpu()
        for own in block.parameters():
            nn.init.zeros_(own)
        return block(*call.args, **call.kwargs)


def _hidden_argument(calls: Sequence[Call], returned: Sequence[Tensor]) -> int | str:
    """Where blocks take the hidden state: each must get the very tensor that the one before returned."""
    if any(own._version for own in returned[: len(calls) - 1]):
        raise Unfit("what one of its modules returned is changed before the next takes it")
    found: set[int | str] = set()
    for call, received in zip(calls[1:], returned, strict=False):
        places = [index for index, own in enumerate(call.args) if own is received]
        found |= {*places[:1], *(key for key, own in call.kwargs.items() if own is received)}
    if len(calls) == 1:
        found = {0} if calls[0].args else {key for key, own in calls[0].kwargs.items() if key == "hidden_states"}
    slots = [place for place in found if place == 0 or isinstance(place, str)]
    if len(slots) != 1:
        raise Unfit("a block does not take what the one before it returned")
    return slots[0]


def _check_shape(call: Call, hidden_argument: int | str, made: Tensor) -> None:
    """All blocks pass on what has one shape: it is what travels between stages."""
    given = call.argument(hidden_argument)
    if given.shape != made.shape:
        raise Unfit(f"its modules change the shape of the hidden state, from {list(given.shape)} to {list(made.shape)}")
