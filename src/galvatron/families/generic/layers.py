"""The layers of a model of no known family: its blocks, and the parts of its own forward around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.context import ContextMask, causal_targets
from galvatron.families.generic.balance import Balance, recorded
from galvatron.families.generic.divided import attending
from galvatron.families.generic.images import IMAGES, padded, unpadded
from galvatron.families.generic.segments import Anatomy, Segment
from galvatron.families.generic.stubs import Call, Held, Stop, StubbedModel
from galvatron.families.layer import Activations, Batch, CrossEntropy, Layer
from galvatron.families.rules import Rule

__all__ = ["Block", "Bridge", "Context", "Embedding", "Head", "LossFunction", "logits_of"]

LossFunction = Callable[[Any, Batch], Tensor]
"""From the model's output and the batch to the loss summed over the targets."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers share for some rows of the batch."""

    batch: Batch
    """With all that the model's forward takes, the decoder's inputs too."""
    dtype: torch.dtype
    calls: tuple[Call | None, ...]
    """How each block is called; the activations in it are not meant. None: it is not, because there is no image."""
    entries: tuple[int, ...] = ()
    """How many entries of ``pixel_values`` each sample has, where there are images."""
    most: int = 0
    """The most that a sample of the whole batch has."""

    blind: bool = False
    """Whether these samples have no image, though the model is given some."""
    mask: ContextMask | None = None
    """Where sequences are divided over ranks: what attention has to know of that."""

    @property
    def attention(self) -> Callable[[nn.Module], AbstractContextManager[None]]:
        """What to run a part of the stock model in."""
        return (lambda _: nullcontext()) if self.mask is None else attending

    def call(self, block: int) -> Call:
        """How a block is called that is."""
        found = self.calls[block]
        assert found is not None
        return found

    def by_rows(self, hidden: Tensor) -> Tensor:
        """A tensor of all entries with samples first, padded."""
        return padded(hidden, self.entries, self.most)

    def as_list(self, rows: Tensor) -> Tensor:
        """The same back."""
        return unpadded(rows, self.entries)


class _Untouched(torch.autograd.Function):
    """The first tensor. Backward gives the others zeros: ranks that saw images wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.likes = [(own.shape, own.dtype, own.device) for own in others]  # which may be gone in backward
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)


class _GenericLayer(Layer):
    """A layer that some samples pass by."""

    def untouched(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """The hidden state, made without some of the layer's parameters, or without other tensors."""
        trained = [own for own in (*self.parameters(), *others) if own.requires_grad]
        passed: Tensor = _Untouched.apply(hidden, *trained) if trained else hidden  # type: ignore[no-untyped-call]
        return passed


class _Around(_GenericLayer):
    """All before, between or after the lists of blocks."""

    def __init__(self, kind: str, anatomy: Anatomy, model: nn.Module, place: int, rules: tuple[Rule, ...] = ()) -> None:
        units = anatomy.around[place]
        super().__init__(kind, anatomy.modules(units), rules)
        self.names = _needed(anatomy)
        # Not a module of this layer: torch must not see the whole model in it.
        self.part = _Part(anatomy, model, units)
        self._checkpoint_names = _checkpoint_names(anatomy, model)
        self.train(model.training)

    @property
    def inputs(self) -> frozenset[str]:
        return self.names

    def detached(self) -> Layer:
        return self  # its part of the stock forward calls these very modules, which no other layer has

    def replace_module(self, path: str, module: nn.Module) -> None:
        super().replace_module(path, module)
        if path in self._stock_names:
            self.part.set_module(self._stock_names[path], module)

    def caller(self, path: str) -> nn.Module:
        return self.get_submodule(path.partition(".")[0])  # a unit may read its children's weights itself (MobileBERT)

    def drawing_modules(self) -> Iterator[nn.Module]:
        return self.part.modules()  # dropouts around the blocks own no parameters, so they belong to no layer

    def stock_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.part.buffers()  # its modules are in there, and others that no layer has

    def stock_name(self, name: str) -> str:
        attribute, _, _ = name.partition(".")
        held = isinstance(getattr(self, attribute), Held)
        found = self._stock_names[attribute] if held else super().stock_name(name)
        return self._checkpoint_names.get(found, found)


class Embedding(_Around):
    """All before the first block."""

    balance: Balance | None = None

    def __init__(
        self, anatomy: Anatomy, model: nn.Module, rules: tuple[Rule, ...], shape: tuple[int, ...] = ()
    ) -> None:
        """``shape``: of an entry of the hidden state, where these are of images."""
        self.segment = anatomy.segments[0]
        super().__init__("vision-embedding" if self.segment.entries else "embedding", anatomy, model, 0, rules)
        self._shape = shape

    def forward(self, activations: Activations, context: Context) -> Activations:
        if self.segment.entries and context.blind:
            like = context.batch["input_ids"]
            shape = (len(like), context.most, *self._shape)
            return (self.untouched(torch.zeros(shape, dtype=context.dtype, device=like.device)),)
        hidden, *handed = self.part.until(self.segment, None, context, training=self.training)
        if context.blind:
            hidden = self.untouched(hidden)
        made = (context.by_rows(hidden) if self.segment.entries else hidden, *handed)
        return made if self.balance is None else (*made, self.balance.start(len(hidden), hidden))


class Bridge(_Around):
    """All between two lists of blocks: ends the encoder and begins the decoder. After a vision tower it puts what was
    seen among the embedded tokens."""

    def __init__(self, anatomy: Anatomy, model: nn.Module, place: int, rules: tuple[Rule, ...] = ()) -> None:
        self.before, self.segment = anatomy.segments[place - 1 : place + 1]
        super().__init__("connector" if self.before.entries else "bridge", anatomy, model, place, rules)

    def forward(self, activations: Activations, context: Context) -> Activations:
        hidden = context.as_list(activations[0]) if self.before.entries else activations[0]
        made = self.part.until(self.segment, hidden, context, training=self.training)
        return (self.untouched(made[0], activations[0]),) if context.blind else made


class Block(_GenericLayer):
    """A block of a list."""

    block: nn.Module
    balance: Balance | None = None

    def __init__(self, anatomy: Anatomy, index: int, block: nn.Module, kind: str, rules: tuple[Rule, ...]) -> None:
        super().__init__(kind, {"block": (anatomy.name(index), block)}, rules)
        self.names, self.index, self.segment = _needed(anatomy), index, anatomy.segment(index)

    @property
    def inputs(self) -> frozenset[str]:
        return self.names

    def forward(self, activations: Activations, context: Context) -> Activations:
        if self.balance is None:
            return self._run(activations, context)
        *given, tally = activations
        with recorded() as scores:
            made = self._run(tuple(given), context)
        return (*made, self.balance.add(tally, scores, context.batch.get("attention_mask")))

    def _run(self, activations: Activations, context: Context) -> Activations:
        call = context.calls[self.index]
        if self.index > self.segment.last_used:
            return activations
        if call is None:
            return (self.untouched(activations[0]), *activations[1:])
        if self.segment.entries:
            activations = (context.as_list(activations[0]), *activations[1:])
        call = self.segment.called_with(call, activations)
        made = self.block(*call.args, **call.kwargs)
        hidden = made if isinstance(made, Tensor) else made[0]
        return (context.by_rows(hidden) if self.segment.entries else hidden, *activations[1:])


class Head(_Around):
    """All after the last block, and the loss."""

    balance: Balance | None = None

    def __init__(
        self, anatomy: Anatomy, model: nn.Module, rules: tuple[Rule, ...], shifted: bool, loss: LossFunction | None
    ) -> None:
        super().__init__("head", anatomy, model, len(anatomy.segments), rules)
        self.shifted, self.custom = shifted, loss
        self.loss = CrossEntropy()

    @property
    def inputs(self) -> frozenset[str]:
        return self.names | {"labels"}

    def fuse(self, projection: str) -> None:
        """Say that the stock module of this name makes the logits, which go into the loss as they are."""
        self.projection = next((own for own, name in self._stock_names.items() if name == projection), None)

    def forward(self, activations: Activations, context: Context) -> Activations:
        output = self.part.after(activations[0], context, training=self.training)
        if self.custom is not None:
            return (self.custom(output, context.batch),)
        targets = causal_targets(context.batch) if self.shifted else context.batch["labels"]
        loss = self.loss(logits_of(output), targets)
        return (loss,) if self.balance is None else (loss, self.balance.term(activations[-1], self.over_rows))


class _Part:
    """The stock forward up to a list of blocks or from the last on, with the real modules of that part."""

    def __init__(self, anatomy: Anatomy, model: nn.Module, real: tuple[str, ...]) -> None:
        self._anatomy = anatomy
        self._stubbed = StubbedModel(model, anatomy.lists, anatomy.units, real)

    def modules(self) -> Iterator[nn.Module]:
        model: nn.Module = self._stubbed.model
        return model.modules()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """By their stock names."""
        model: nn.Module = self._stubbed.model
        return model.named_buffers(remove_duplicate=False)

    def set_module(self, name: str, module: nn.Module) -> None:
        """Put another module in the place of the stock one of this name."""
        self._stubbed.model.set_submodule(name, module)

    def until(self, segment: Segment, hidden: Tensor | None, context: Context, *, training: bool) -> Activations:
        """What enters the first block of a list; ``hidden``: what the block before it returned, if there is one."""
        found: list[Activations] = []
        before = self._anatomy.segment(segment.first - 1).last_used if segment.first else None

        def capture(call: Call) -> Any:
            if call.block == segment.first:
                found.append(segment.activations(call))
                raise Stop
            if hidden is not None and call.block == before:
                return self._anatomy.returned(call, hidden)
            return self._anatomy.passed(call)

        self._stubbed.on_block = capture
        with context.attention(self._stubbed.model):
            self._stubbed.run(self._anatomy.pick(context.batch), context.dtype, training=training)
        return found[0]

    def after(self, hidden: Tensor, context: Context, *, training: bool) -> Any:
        last = self._anatomy.segments[-1]
        self._stubbed.on_block = lambda call: self._anatomy.returned(
            call, hidden if call.block >= last.first else self._anatomy.hidden(call)
        )
        with context.attention(self._stubbed.model):
            return self._stubbed.run(self._anatomy.pick(context.batch), context.dtype, training=training)


def _needed(anatomy: Anatomy) -> frozenset[str]:
    """What a layer reads of the batch; the inputs of a decoder are made from labels."""
    made = {"labels"} if len(anatomy.segments) > 1 and not anatomy.segments[0].entries else set()
    return anatomy.inputs | made | {IMAGES}


def _checkpoint_names(anatomy: Anatomy, model: nn.Module) -> dict[str, str]:
    """What checkpoints call parameters whose first name is that of a module in no layer: the embedding, say, that
    encoder and decoder share, of which each has a copy."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(own, name) for name, own in model.named_parameters(remove_duplicate=False)}
    nameless = tuple(f"{unit}." for unit in anatomy.nameless)
    return {name: own for name, own in names.items() if f"{own}.".startswith(nameless)}


def logits_of(output: Any) -> Tensor:
    """The scores in what a model returns."""
    if isinstance(output, Tensor):
        return output
    found = output["logits"] if isinstance(output, Mapping) and "logits" in output else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise InvalidInput(
            f"the model returns a {type(output).__name__} without logits; give a loss function of your own"
        )
    return found
