"""A model of no known family: its repeated blocks as layers, and all before and after them as two more.

Works for any model, of Hugging Face or not, with one list of blocks that run in order, each taking what the one before
returned: ``embedding``, ``block`` × N (or several kinds of blocks), ``head``. Runs the stock model's own forward, in
parts (see ``stubs``), so nothing has to be known about it; what does not fit is found by a trial run at once, and
named. Tensor and expert parallelism are what the stock model's own plans say (see ``tensor_plan``, ``expert_plan``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import TensorParallel
from galvatron.families.adapters import count_targets, masked_labels, next_tokens, random_tokens, sides
from galvatron.families.generic.expert_plan import find_experts
from galvatron.families.generic.kinds import block_kinds
from galvatron.families.generic.own_loss import refuse_balance_loss, shifts_labels
from galvatron.families.generic.stubs import Call, Held, Stop, StubbedModel
from galvatron.families.generic.tensor_plan import divides
from galvatron.families.generic.tensor_rules import find_rules
from galvatron.families.generic.trial import Anatomy, find_blocks
from galvatron.families.layer import Activations, Batch, CrossEntropy, Layer, LayeredModel, Tie, Use
from galvatron.families.rules import Columns, Experts, Rows, Rule, SharedKey, Summed, Vocabulary, VocabularyLoss

__all__ = ["Generic", "LossFunction", "logits_of", "shortened"]

LossFunction = Callable[[Any, Batch], Tensor]
"""From the model's output and the batch to the loss summed over the targets."""

_LENGTH = 512
"""Tokens of a sample if neither user nor configuration says."""
_PIXELS = 224
_TRIAL = (2, 8)
"""Samples and tokens of the trial run."""


@dataclass(frozen=True, slots=True)
class _Context:
    batch: Batch
    dtype: torch.dtype
    calls: tuple[Call, ...]
    """How each block is called; the hidden state in it is not meant."""


class _Around(Layer):
    """All before or after the blocks."""

    def __init__(
        self, kind: str, anatomy: Anatomy, model: nn.Module, units: tuple[str, ...], rules: tuple[Rule, ...] = ()
    ) -> None:
        super().__init__(kind, anatomy.modules(units), rules)
        self.names = anatomy.inputs
        # Not a module of this layer: torch must not see the whole model in it.
        self.part = _Part(anatomy, model, units)
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

    def stock_name(self, name: str) -> str:
        attribute, _, _ = name.partition(".")
        held = isinstance(getattr(self, attribute), Held)
        return self._stock_names[attribute] if held else super().stock_name(name)


class _Embedding(_Around):
    def __init__(self, anatomy: Anatomy, model: nn.Module, rules: tuple[Rule, ...]) -> None:
        super().__init__("embedding", anatomy, model, anatomy.before, rules)

    def forward(self, activations: Activations, context: _Context) -> Activations:
        return (self.part.before(context, training=self.training),)


class _Block(Layer):
    block: nn.Module

    def __init__(self, anatomy: Anatomy, index: int, block: nn.Module, kind: str, rules: tuple[Rule, ...]) -> None:
        super().__init__(kind, {"block": (f"{anatomy.blocks}.{index}", block)}, rules)
        self.names, self.index, self.hidden_argument = anatomy.inputs, index, anatomy.hidden_argument

    @property
    def inputs(self) -> frozenset[str]:
        return self.names

    def forward(self, activations: Activations, context: _Context) -> Activations:
        call = context.calls[self.index]
        args, kwargs = call.with_hidden(self.hidden_argument, activations[0])
        made = self.block(*args, **kwargs)
        return (made if isinstance(made, Tensor) else made[0],)


class _Head(_Around):
    def __init__(
        self, anatomy: Anatomy, model: nn.Module, rules: tuple[Rule, ...], shifted: bool, loss: LossFunction | None
    ) -> None:
        super().__init__("head", anatomy, model, anatomy.after, rules)
        self.shifted, self.custom = shifted, loss
        self.loss = CrossEntropy()

    @property
    def inputs(self) -> frozenset[str]:
        return self.names | {"labels"}

    def forward(self, activations: Activations, context: _Context) -> Activations:
        output = self.part.after(activations[0], context, training=self.training)
        if self.custom is not None:
            return (self.custom(output, context.batch),)
        labels = context.batch["labels"]
        return (self.loss(logits_of(output), next_tokens(labels) if self.shifted else labels),)


class _Part:
    """The stock forward up to the blocks or from them on, with the real modules of that part."""

    def __init__(self, anatomy: Anatomy, model: nn.Module, real: tuple[str, ...]) -> None:
        self._anatomy = anatomy
        self._stubbed = StubbedModel(model, anatomy.blocks, anatomy.units, real)

    def modules(self) -> Iterator[nn.Module]:
        model: nn.Module = self._stubbed.model
        return model.modules()

    def set_module(self, name: str, module: nn.Module) -> None:
        """Put another module in the place of the stock one of this name."""
        self._stubbed.model.set_submodule(name, module)

    def before(self, context: _Context, *, training: bool) -> Tensor:
        found: list[Tensor] = []

        def capture(call: Call) -> Any:
            found.append(self._anatomy.hidden(call))
            raise Stop

        self._stubbed.on_block = capture
        self._stubbed.run(self._anatomy.pick(context.batch), context.dtype, training=training)
        return found[0]

    def after(self, hidden: Tensor, context: _Context, *, training: bool) -> Any:
        self._stubbed.on_block = lambda call: self._anatomy.wrap(hidden)
        return self._stubbed.run(self._anatomy.pick(context.batch), context.dtype, training=training)


class Generic(LayeredModel):
    """``batch``: an example, needed unless it is a Hugging Face model of tokens or images. ``loss``: in place of the
    cross-entropy of the logits against ``labels``, shifted where the model's own loss shifts them."""

    def __init__(self, model: Any, batch: Batch | None = None, loss: LossFunction | None = None) -> None:
        super().__init__(model)
        name = type(model).__name__
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InvalidInput(
                f"{name}: has an encoder and a decoder, which the generic cut would not keep apart; it needs an adapter"
            )
        refuse_balance_loss(model)
        self._sample = batch
        trial = self.example(_TRIAL[0], _TRIAL[1] if self.takes_tokens else None, torch.Generator().manual_seed(0))
        if type(model).__module__.startswith("transformers."):
            trial = shortened(trial, _TRIAL[1])
        self._dtypes = {key: own.dtype for key, own in trial.items()}
        self.anatomy = find_blocks(model, trial)
        for _, idle in self.anatomy.modules(self.anatomy.idle).values():
            idle.requires_grad_(False)  # in one process it has no gradient, so that no optimizer touches it
        self._shifted = _shifts(model, self.anatomy, trial, loss)
        self._stubbed = StubbedModel(model, self.anatomy.blocks, self.anatomy.units)
        blocks = list(model.get_submodule(self.anatomy.blocks).children())
        kinds = block_kinds(model, blocks)
        self.tensor_rules = find_rules(model, self.anatomy, kinds, self.context(trial, torch.float32).calls)
        self.expert_rules = find_experts(model, self.anatomy.blocks, kinds)
        rules = self.tensor_rules.blocks
        around = self._around_rules(model, loss) if rules else ((), ())
        self.layers = (
            _Embedding(self.anatomy, model, around[0]),
            *(
                _Block(self.anatomy, index, block, kind, rules.get(kind, ()))
                for index, (block, kind) in enumerate(zip(blocks, kinds, strict=True))
            ),
            _Head(self.anatomy, model, around[1], self._shifted, loss),
        )
        for layer in self.layers:
            layer.experts = self.expert_rules.blocks.get(layer.kind)
        self.ties = _shared(self.layers)
        self.required = frozenset(trial) | {"labels"}

    def tensor_parallel(
        self, layer: Layer, *, boundary_bytes: int = 0, tokens: int | None = None
    ) -> TensorParallel | None:
        """How a layer behaves under TP; None: nothing of it is split. ``tokens``: of a sample, where they are known."""
        if not layer.rules:
            return None
        summed = sum(isinstance(rule, Rows | Vocabulary | Experts | Summed) for rule in layer.rules)
        inputs = {
            (rule.input, rule.path if rule.input is None else "") for rule in layer.rules if isinstance(rule, Columns)
        }
        entered = len(inputs) + sum(isinstance(rule, Experts | SharedKey) for rule in layer.rules)
        gathered = sum(isinstance(rule, Columns) and rule.gathered for rule in layer.rules)
        return TensorParallel(
            divides=divides(layer, self.model.config),
            forward_collectives=summed + gathered,
            backward_collectives=entered,
            message_bytes=boundary_bytes,
            sequence_divides=(tokens,) if tokens and layer.kind in self.tensor_rules.divisible else (),
        )

    def _around_rules(self, model: Any, loss: LossFunction | None) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
        """The vocabulary is split where the embedding is one, and where the head's scores go into our own loss."""
        words = {name: own for name, (_, own) in self.anatomy.modules(self.anatomy.before).items()}
        scores = {name: own for name, (_, own) in self.anatomy.modules(self.anatomy.after).items()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        before = tuple(
            Vocabulary(name) for name, own in words.items() if own is embedding and isinstance(own, nn.Embedding)
        )
        after = tuple(
            rule
            for name, own in scores.items()
            if own is head and type(own) is nn.Linear and loss is None
            for rule in (Columns(name), VocabularyLoss("loss"))
        )
        shared = embedding is not None and head is not None and embedding.weight is head.weight
        return (before, after) if not shared or bool(before) == bool(after) else ((), ())

    def context(self, batch: Batch, dtype: torch.dtype) -> _Context:
        inputs = self.anatomy.pick(batch)
        if not inputs:
            return _Context(batch, dtype, ())
        new = [name for name, own in inputs.items() if name not in self._dtypes and own.is_floating_point()]
        if new and self.anatomy.idle:
            raise InvalidInput(
                f"{type(self.model).__name__}: the batch has {new[0]}, for which {self.anatomy.idle[0]} may be needed, "
                "which is left out because the example had none; give an example batch that has it"
            )
        calls: list[Call] = []
        last = self.anatomy.count - 1

        def record(call: Call) -> Any:
            calls.append(call)
            if call.block == last:
                raise Stop
            return self.anatomy.wrap(self.anatomy.hidden(call))

        self._stubbed.on_block = record
        with torch.no_grad():
            self._stubbed.run(inputs, dtype, training=False)
        return _Context(batch, dtype, tuple(calls))

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        batch = {key: torch.zeros((1, *samples[key]), dtype=own) for key, own in self._dtypes.items() if key in samples}
        context = self.context(batch, torch.float32)
        return (tuple(self.anatomy.hidden(context.calls[0]).shape[1:]),)

    def targets(self, batch: Batch) -> int:
        labels = batch["labels"]
        return count_targets(labels[..., 1:] if self._shifted else labels)

    @property
    def takes_tokens(self) -> bool:
        """Whether a random example is made of tokens, so many as are asked for."""
        return self._sample is None and getattr(self.model, "main_input_name", None) == "input_ids"

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        if self._sample is not None:
            count = len(next(iter(self._sample.values())))
            chosen = torch.randint(count, (rows,), generator=generator, device=generator.device)
            return {key: own[chosen.to(own.device)].to(generator.device) for key, own in self._sample.items()}
        config: Any = getattr(self.model, "config", None)
        if self.takes_tokens:
            return self._text(config.get_text_config(), rows, sequence_length, generator)
        if getattr(self.model, "main_input_name", None) == "pixel_values":
            size = (rows, *_image(config))
            labels = torch.randint(config.num_labels, (rows,), generator=generator, device=generator.device)
            return {"pixel_values": torch.randn(size, generator=generator, device=generator.device), "labels": labels}
        raise InvalidInput(
            f"{type(self.model).__name__}: what goes into it is not known; "
            "give an example batch with its inputs and labels"
        )

    def _text(self, config: Any, rows: int, length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        name = type(self.model).__name__
        length = length or min(_LENGTH, getattr(config, "max_position_embeddings", _LENGTH))
        ids = random_tokens(rows, length, config.vocab_size, generator)
        if "MaskedLM" in name:
            return {"input_ids": ids, "labels": masked_labels(ids, generator)}
        if "Classification" in name:
            shape = ids.shape if "Token" in name else ids.shape[:1]
            return {"input_ids": ids, "labels": torch.randint(config.num_labels, shape, generator=generator)}
        return {"input_ids": ids, "labels": ids.clone()}


def _shifts(model: nn.Module, anatomy: Anatomy, trial: Batch, loss: LossFunction | None) -> bool:
    try:
        return shifts_labels(model, anatomy, trial)
    except InvalidInput:
        if loss is None:
            raise
        return False  # the user's loss is what counts, over all labels


def shortened(batch: Batch, tokens: int) -> dict[str, Tensor]:
    """A batch of tokens with at most so many a sample: what is found out by a trial depends on no more."""
    shape = batch["input_ids"].shape[:2] if "input_ids" in batch else None
    return {name: own[:, :tokens] if own.shape[:2] == shape else own for name, own in batch.items()}


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image; models that take any size are tried with a usual one."""
    vision = getattr(config, "vision_config", config)
    height, width = sides(getattr(vision, "image_size", _PIXELS))
    return getattr(vision, "num_channels", 3), height, width


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


def _shared(layers: tuple[Layer, ...]) -> tuple[Tie, ...]:
    uses: dict[nn.Parameter, list[Use]] = {}
    for index, layer in enumerate(layers):
        for name, own in layer.named_parameters():
            uses.setdefault(own, []).append(Use(index, name))
    return tuple(Tie(tuple(places)) for places in uses.values() if len(places) > 1)
