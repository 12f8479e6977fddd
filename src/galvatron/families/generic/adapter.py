"""A model of no known family: its repeated blocks as layers, and all before, between and after them as others.

Works for any model, of Hugging Face or not, with one list of blocks that run in order, each taking what the one before
returned: ``embedding``, ``block`` × N (or several kinds of blocks), ``head``; and with two such lists: ``embedding``,
``encoder`` × N, ``bridge``, ``decoder`` × M, ``head``. Runs the stock model's own forward, in parts (see ``stubs``), so
nothing has to be known about it; what does not fit is found by a trial run at once, and named. Tensor and expert
parallelism are what the stock model's own plans say (see ``tensor_plan``, ``expert_plan``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import TensorParallel
from galvatron.families.adapters import count_targets
from galvatron.families.context import mask_given
from galvatron.families.generic.balance import record_scores
from galvatron.families.generic.decoder_inputs import DecoderInputs
from galvatron.families.generic.divided import (
    TRIAL,
    SeenAttention,
    attending,
    block_attention,
    masked_otherwise,
    why_undivided,
)
from galvatron.families.generic.examples import random_batch, shortened, takes_tokens
from galvatron.families.generic.expert_plan import find_experts
from galvatron.families.generic.images import IMAGES, PIXELS, ImageRows
from galvatron.families.generic.kinds import block_kinds
from galvatron.families.generic.layers import Block, Bridge, Context, Embedding, Head, LossFunction, logits_of
from galvatron.families.generic.own_loss import find_balance, refuse_capacity, refuse_layer_drop, shifts_labels
from galvatron.families.generic.projection import fusible_projection, is_called
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.shared import without_shared
from galvatron.families.generic.stubs import Call, Stop, StubbedModel
from galvatron.families.generic.tensor_plan import divides
from galvatron.families.generic.tensor_rules import find_rules
from galvatron.families.generic.trial import find_blocks
from galvatron.families.layer import IGNORED, Batch, Layer, LayeredModel, shared_weights
from galvatron.families.rules import Columns, Experts, Rows, Rule, SharedKey, Summed, Vocabulary, VocabularyLoss

__all__ = ["Generic", "LossFunction", "logits_of", "shortened"]

_TRIAL = (2, 8)
"""Samples and tokens of the trial run."""
_STACKS, _TOWER = ("encoder", "decoder"), ("vision", "")


class Generic(LayeredModel):
    """``batch``: an example, needed unless it is a Hugging Face model of tokens or images. ``loss``: in place of the
    cross-entropy of the logits against ``labels``, shifted where the model's own loss shifts them."""

    def __init__(self, model: Any, batch: Batch | None = None, loss: LossFunction | None = None) -> None:
        super().__init__(model)
        refuse_capacity(model)
        refuse_layer_drop(model)
        self._sample, self._own_loss = batch, loss is not None
        self._undivided: dict[str, str | None] = {}
        self._images = ImageRows(model)
        trial = self.example(*_TRIAL, torch.Generator().manual_seed(0))
        if type(model).__module__.startswith("transformers."):
            trial = shortened(trial, self._images.end(trial) + _TRIAL[1])
        self._dtypes = {key: own.dtype for key, own in trial.items()}
        self._decoder_inputs = DecoderInputs(model, trial)
        self.anatomy = find_blocks(model, self._decoder_inputs.complete(trial))
        self._decoder_inputs.prove(self.anatomy, trial)
        for _, idle in self.anatomy.modules(self.anatomy.idle).values():
            idle.requires_grad_(False)  # in one process it has no gradient, so that no optimizer touches it
        for name in self.anatomy.unused:
            model.get_submodule(name).requires_grad_(False)
        self._shifted = _shifts(model, self.anatomy, trial, loss)
        self.balance = find_balance(model, self.anatomy, trial, own_loss=loss is None)
        if self.balance is not None:
            self.wide_activations = 1
            record_scores(model, self.anatomy.lists[0])
        self._fusible = fusible_projection(model, self.anatomy, self._decoder_inputs.complete(trial))
        self._stubbed = StubbedModel(model, self.anatomy.lists, self.anatomy.units)
        kinds = self._kinds()
        self._entry: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        context = self.context(self.by_rows(trial), torch.float32)
        calls = [context.call(block) for block in range(len(kinds))]
        if self.anatomy.segments[0].entries:
            seen = self.anatomy.segments[0].hidden(calls[0])
            self._entry = tuple(trial[PIXELS].shape[1:]), tuple(seen.shape[1:])
        self._width = self.anatomy.segments[-1].hidden(calls[-1]).shape[-1]
        names = [self.anatomy.name(block) for block in range(len(kinds))]
        self.expert_rules = find_experts(model, names, kinds)
        rules = find_rules(model, self.anatomy, kinds, calls, self.expert_rules.blocks)
        self.tensor_rules = without_shared(rules, [model.get_submodule(name) for name in names], kinds)
        self._trial = trial
        self.layers = self._layers(kinds, loss)
        for layer in self.layers:
            layer.experts = self.expert_rules.blocks.get(layer.kind)
        self.ties = shared_weights(self.layers)
        self.shifts_labels = self._shifted
        self.required = frozenset(trial) | {"labels"}

    def _kinds(self) -> list[str]:
        """Of each block."""
        lists = [list(self.model.get_submodule(name).children()) for name in self.anatomy.lists]
        stacks = (_TOWER if self.anatomy.segments[0].entries else _STACKS) if len(lists) > 1 else ("",)
        kinds = [
            kind for blocks, stack in zip(lists, stacks, strict=True) for kind in block_kinds(self.model, blocks, stack)
        ]
        unused = {index for index in range(len(kinds)) if index > self.anatomy.segment(index).last_used}
        return [f"{kind}-unused" if index in unused else kind for index, kind in enumerate(kinds)]

    def _layers(self, kinds: list[str], loss: LossFunction | None) -> tuple[Layer, ...]:
        model, anatomy, rules = self.model, self.anatomy, self.tensor_rules.blocks
        # Of two stacks the embedding is whole: that of the decoder is tied to it, and may be computed otherwise.
        tower = anatomy.segments[0].entries
        split = rules and (tower or len(anatomy.segments) == 1)
        first, last = self._around_rules(model, loss) if split else ((), ())
        shape = self._entry[1] if self._entry else ()
        embedding = Embedding(anatomy, model, () if tower else first, shape)
        embedding.balance = self.balance
        layers: list[Layer] = [embedding]
        for place, segment in enumerate(anatomy.segments):
            if place:
                layers.append(Bridge(anatomy, model, place, first if tower else ()))
            for index in range(segment.first, segment.last + 1):
                block = model.get_submodule(anatomy.name(index))
                own = Block(anatomy, index, block, kinds[index], rules.get(kinds[index], ()))
                own.balance = self.balance
                layers.append(own)
        head = Head(anatomy, model, last, self._shifted, loss)
        head.balance = self.balance
        if loss is None and self._fusible is not None:
            head.fuse(self._fusible)
        return (*layers, head)

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
            sequence_divides=(tokens,) if tokens and self._divides_sequence(layer) else (),
        )

    def _divides_sequence(self, layer: Layer) -> bool:
        """A tally is of whole samples, so ranks must not have parts of them."""
        return self.balance is None and layer.kind in self.tensor_rules.divisible

    def attention(self, layer: Layer) -> SeenAttention | str | None:
        """That of a block, if context parallelism can divide its sequences; else why not. None: it has none."""
        if not isinstance(layer, Block):
            return None
        try:
            return block_attention(self.model, self.anatomy, self._tried[layer.index])
        except Exception as error:  # of whatever kind: stock code meets what stands for a mask
            return _untried(self.model, error)

    def calling_modules(self) -> Iterator[nn.Module]:
        yield from super().calling_modules()
        yield from self._stubbed.model.modules()

    def separates_documents(self) -> bool:
        return self._separates

    @cached_property
    def _separates(self) -> bool:
        """As a trial with two documents in each row shows."""
        ids = self._trial["input_ids"]
        places = torch.arange(ids.shape[1]) % (ids.shape[1] // 2)
        found = self._calls_noted({**self._trial, "position_ids": places.expand(ids.shape)})
        return any(
            masked_otherwise(own) and not masked_otherwise(before)
            for before, own in zip(self._tried, found, strict=True)
        )

    @cached_property
    def _tried(self) -> list[Call]:
        return self._calls_noted(self._trial)

    def _calls_noted(self, batch: Batch) -> list[Call]:
        """How blocks are called where attention and masks only note what they are asked for."""
        with attending(self._stubbed.model, TRIAL):
            context = self.context(self.by_rows(batch), torch.float32)
        return [context.call(block) for block in range(self.anatomy.last + 1)]

    def why_undivided(self, index: int) -> str | None:
        layer = self.layers[index]
        if "" not in self._undivided:
            name, own = type(self.model).__name__, None
            if self._own_loss:
                own = f"{name} has a loss of your own"
            elif self.wide_activations:
                own = f"the loss of {name} has a term for the balance of experts, which is counted by whole samples"
            try:
                self._undivided[""] = own or why_undivided(self.model, self.anatomy, self._trial)
            except Exception as error:  # of whatever kind, as above
                self._undivided[""] = _untried(self.model, error)
        if layer.kind not in self._undivided:
            found = self.attention(layer)
            self._undivided[layer.kind] = found if isinstance(found, str) else None
        return self._undivided[""] or self._undivided[layer.kind]

    def _around_rules(self, model: Any, loss: LossFunction | None) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
        """The vocabulary is split where the embedding is one, and where the head's scores go into our own loss."""
        words = {name: own for name, (_, own) in self.anatomy.modules(self.anatomy.around[-2]).items()}
        scores = {name: own for name, (_, own) in self.anatomy.modules(self.anatomy.around[-1]).items()}
        try:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        except (NotImplementedError, AttributeError):  # of images alone, or none of Hugging Face's
            return (), ()
        before = tuple(
            Vocabulary(name) for name, own in words.items() if own is embedding and isinstance(own, nn.Embedding)
        )
        after = tuple(
            rule
            for name, unit in scores.items()
            for path, own in unit.named_modules(prefix=name)
            if own is head and type(own) is nn.Linear and loss is None
            for rule in (Columns(path), VocabularyLoss("loss"))
        )
        paths = [path for path, own in model.named_modules() if own is head]
        batch = self._decoder_inputs.complete(self._trial)
        if after and not any(is_called(model, self.anatomy, batch, path) for path in paths[:1]):
            return (), ()
        weights = [getattr(own, "weight", None) for own in (embedding, head)]
        shared = weights[0] is not None and weights[0] is weights[1]
        return (before, after) if not shared or bool(before) == bool(after) else ((), ())

    def shared_buffers(self) -> Iterator[tuple[str, Tensor]]:
        own: nn.Module = self._stubbed.model
        return own.named_buffers(remove_duplicate=False)

    def by_rows(self, batch: Batch) -> Batch:
        return self._images.by_rows(batch)

    def context(self, batch: Batch, dtype: torch.dtype) -> Context:
        rows = batch
        batch = self._decoder_inputs.complete(self._images.as_lists(batch))
        inputs = self.anatomy.pick(batch)
        if not inputs:
            return Context(batch, dtype, (), mask=mask_given())
        new = [name for name, own in inputs.items() if name not in self._dtypes and own.is_floating_point()]
        if new and self.anatomy.idle:
            raise InvalidInput(
                f"{type(self.model).__name__}: the batch has {new[0]}, for which {self.anatomy.idle[0]} may be needed, "
                "which is left out because the example had none; give an example batch that has it"
            )
        calls: list[Call] = []

        def record(call: Call) -> Any:
            calls.append(call)
            if call.block == self.anatomy.last:
                raise Stop
            return self.anatomy.passed(call)

        self._stubbed.on_block = record
        mask = mask_given()
        with torch.no_grad(), nullcontext() if mask is None else attending(self._stubbed.model):
            self._stubbed.run(inputs, dtype, training=False)
        blind = PIXELS in rows and PIXELS not in batch
        if not self.anatomy.segments[0].entries:
            return Context(batch, dtype, tuple(calls), blind=blind, mask=mask)
        made = {call.block: call for call in calls}
        found = tuple(made.get(block) for block in range(self.anatomy.last + 1))
        entries = tuple(self._images.entries(rows))
        self._check_entries(found[0], sum(entries))
        return Context(batch, dtype, found, entries, _most(rows), blind)

    def _check_entries(self, first: Call | None, count: int) -> None:
        """What a vision tower works on must be what the batch has, one for one."""
        given = 0 if first is None else len(self.anatomy.hidden(first))
        if given != count:
            raise InvalidInput(
                f"{type(self.model).__name__}: its vision tower works on {given} images or patches, but the batch has "
                f"{count}, so they cannot be divided over samples; give an example batch that is like this one"
            )

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        if PIXELS in samples and PIXELS in self._dtypes and "input_ids" in samples:
            return (self._carried_beside_images(index, samples),)
        batch = {key: torch.zeros((1, *samples[key]), dtype=own) for key, own in self._dtypes.items() if key in samples}
        context = self.context(batch, torch.float32)
        # Of layers: an embedding or a bridge stands before each list of blocks.
        starts = [segment.first + place + 1 for place, segment in enumerate(self.anatomy.segments)]
        segment = self.anatomy.segments[max(sum(start <= index for start in starts) - 1, 0)]
        shapes = tuple(tuple(own.shape[1:]) for own in segment.activations(context.call(segment.first)))
        return shapes if self.balance is None else (*shapes, (self.balance.width,))

    def _carried_beside_images(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Which no random batch shows: its tokens must fit its images."""
        tower = self.anatomy.segments[0]
        if not tower.entries or index > tower.count + 1:
            return samples["input_ids"][0], self._width
        assert self._entry is not None
        listed = IMAGES in samples
        seen = samples[PIXELS][1:] if listed else samples[PIXELS]
        if seen != self._entry[0]:
            raise InvalidInput(
                f"batch: {PIXELS} has images of {list(seen)}, the example has {list(self._entry[0])}; give an example "
                "batch of the size that you train with"
            )
        return (samples[PIXELS][0] if listed else 1, *self._entry[1])

    def targets(self, batch: Batch) -> int:
        labels = batch["labels"][..., 1:] if self._shifted else batch["labels"]
        return int((labels != IGNORED).sum()) if self._own_loss else count_targets(labels)

    @property
    def takes_tokens(self) -> bool:
        """Whether a random example is made of tokens, so many as are asked for."""
        return self._sample is None and takes_tokens(self.model)

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        if self._sample is not None:
            sample = self.by_rows(self._sample)
            count = len(next(iter(sample.values())))
            chosen = torch.randint(count, (rows,), generator=generator, device=generator.device)
            drawn = {key: own[chosen.to(own.device)].to(generator.device) for key, own in sample.items()}
            return dict(self._images.as_lists(drawn))
        return random_batch(self.model, rows, sequence_length, generator)


def _untried(model: nn.Module, error: Exception) -> str:
    said = str(error).partition("\n")[0]
    return f"{type(model).__name__} cannot be tried out with divided sequences ({type(error).__name__}: {said})"


def _most(batch: Batch) -> int:
    """Entries of ``pixel_values`` that a sample of the whole batch has at most."""
    return batch[PIXELS].shape[1] if IMAGES in batch else 1


def _shifts(model: nn.Module, anatomy: Anatomy, trial: Batch, loss: LossFunction | None) -> bool:
    try:
        return shifts_labels(model, anatomy, trial)
    except InvalidInput:
        if loss is None:
            raise
        return False  # the user's loss is what counts, over all labels
