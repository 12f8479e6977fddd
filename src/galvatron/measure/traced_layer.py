"""What one layer does with one sample of fake tensors, run once: its work, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from galvatron.families.layer import Activations, Layer
from galvatron.measure.partition import saved_when_compiled
from galvatron.measure.work import FUSED_FLOPS, Work, again_flops, bytes_of
from galvatron.runtime.compiled import compiled_part
from galvatron.runtime.selective import Grade

__all__ = ["Inside", "Traced", "sizes", "trace"]

_LEAST_PRODUCTS = 2
"""With fewer (a head) selective recompute would keep next to everything."""
_MOST_OPERATIONS = 400
"""Of a block whose compiled form is asked for what it saves. A loop over time has more, and asking takes long."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What a layer does with one sample."""

    parameters: int
    flops: int
    attention_flops: int
    """Of these, the ones of fused attention."""
    saved: int
    largest: int
    """Bytes of its largest operation, in and out."""
    boundary: int
    """Bytes of all tensors that it hands on."""
    message: int
    """Bytes of the first of them, the hidden state."""
    experts: Inside | None
    """Of these, what happens inside its experts."""
    kept: dict[Grade, tuple[int, int]]
    """By grade of recompute: bytes of the results it keeps, and operations that it does again."""


@dataclass(slots=True)
class Inside:
    """What a layer's experts do with one sample."""

    flops: int = 0
    saved: int = 0
    dispatch: int = 0
    """Bytes of its tokens, once for each of their experts."""


def trace(
    layer: Layer, activations: Activations, context: Any, given: set[int], *, compiled: bool
) -> tuple[Activations, Traced]:
    """Run it; what it returned, and what that took. ``given``: memory of inputs that all layers have, which do not
    count; ``compiled``: its block would be."""
    work = Work(layer.parameters(), given)
    counter = FlopCounterMode(display=False, custom_mapping=FUSED_FLOPS)
    inside = None if layer.experts is None else Inside()
    block = compiled_part(layer) if compiled and inside is None else None
    calls: list[_Call] = []
    with ExitStack() as stack:
        if block is not None:
            stack.enter_context(_called(block, calls, lambda: (work.saved, work.operations)))
        if layer.experts is not None and inside is not None:
            module = layer.get_submodule(layer.experts.path)
            stack.enter_context(_watched(module, inside, lambda: (work.flops + counter.get_total_flops(), work.saved)))
        stack.enter_context(counter)
        stack.enter_context(saved_tensors_hooks(work.pack, lambda own: own))
        stack.enter_context(work)
        made = layer(activations, context)
    saved = work.saved
    if block is not None:
        saved -= sum(call.spared(block, given) for call in calls)
    boundary, message = sizes(made)
    return made, Traced(
        parameters=sum(own.numel() for own in layer.parameters()),
        flops=work.flops + counter.get_total_flops(),
        attention_flops=counter.get_total_flops() - again_flops(counter, Grade.ATTENTION),
        saved=saved,
        largest=work.largest,
        boundary=boundary,
        message=message,
        experts=inside,
        kept=_kept(work, counter),
    )


def _kept(work: Work, counter: FlopCounterMode) -> dict[Grade, tuple[int, int]]:
    """What grades of recompute keep, where they keep anything and leave anything out."""
    # torch's counter does not know products of experts, which are kept.
    again = {
        Grade.PRODUCTS: again_flops(counter, Grade.PRODUCTS),
        Grade.ATTENTION: again_flops(counter, Grade.ATTENTION) + work.flops - work.unneeded_flops,
    }
    least = {Grade.PRODUCTS: work.products >= _LEAST_PRODUCTS, Grade.ATTENTION: work.kept(Grade.ATTENTION) > 0}
    return {grade: (work.kept(grade), again[grade]) for grade in Grade if least[grade]}


def sizes(activations: Activations) -> tuple[int, int]:
    """Bytes of all that a layer hands on, and of the first of it, the hidden state."""
    return sum(map(bytes_of, activations)), bytes_of(activations[0])


@dataclass(frozen=True, slots=True)
class _Call:
    """A block's."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    saved: int
    """Bytes, operation by operation."""
    operations: int

    def spared(self, block: nn.Module, given: set[int]) -> int:
        """How many bytes fewer it saves where the block is compiled; now and then a compiler keeps more."""
        if self.operations > _MOST_OPERATIONS:
            return 0
        saved = saved_when_compiled(block, self.args, self.kwargs, given)
        return 0 if saved is None else self.saved - saved


@contextmanager
def _called(block: nn.Module, calls: list[_Call], so_far: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Add each call of a block; ``so_far``: saved bytes and operations of the layer."""
    before: list[tuple[int, int]] = []

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        (saved, operations), first = so_far(), before.pop()
        calls.append(_Call(args, kwargs, saved - first[0], operations - first[1]))

    hooks = [
        block.register_forward_pre_hook(lambda *_: before.append(so_far())),
        block.register_forward_hook(leave, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched(module: nn.Module, inside: Inside, so_far: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Add up what happens while a module of experts runs; ``so_far``: operations and saved bytes of the layer."""
    before: list[tuple[int, int]] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        hidden, chosen = args[:2]
        inside.dispatch += chosen.numel() * hidden.shape[-1] * hidden.element_size()
        before.append(so_far())

    def leave(*_: Any) -> None:
        flops, saved = so_far()
        first = before.pop()
        inside.flops += flops - first[0]
        inside.saved += saved - first[1]

    hooks = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
