"""What the planner needs to know of a model without a family: sizes and work of each kind of its layers.

Each kind runs once on one sample with fake tensors: they have shapes but no values, so that it takes neither memory nor
time, whatever the model's size. Where tensor parallelism can split it, it runs a second time as one of two ranks: what
then is half was split, what is the same is on each rank.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Experts, FusedLoss, Kept, LayerSpec, ModelSpec, Precision, TensorParallel, Training
from galvatron.families.build import with_buffers, without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.images import PIXELS, image_token
from galvatron.families.generic.layers import Bridge, Embedding
from galvatron.families.generic.own_module import InputsFunction, OwnLoss, own_module
from galvatron.families.generic.tensor_plan import plan_of
from galvatron.families.given import as_stock
from galvatron.families.layer import Activations, Batch, Layer
from galvatron.families.rules import Summed
from galvatron.families.tuning import frozen_parts, tuned
from galvatron.measure.contexts import context_facts, say_undivided
from galvatron.measure.real_integers import RealIntegers, faked, faked_tensor
from galvatron.measure.traced_layer import Inside, Traced, sizes, trace
from galvatron.measure.work import Decided, storage_of, tensors_in
from galvatron.runtime.experts.dispatch import expert_tables
from galvatron.runtime.selective import Grade
from galvatron.runtime.split_trial import split_problems
from galvatron.runtime.tensor_parallel.simulated import LoneGroup
from galvatron.runtime.tensor_parallel.split import TensorGroup, split

__all__ = ["describe"]

_LOG = logging.getLogger(__name__)
_RANKS = 2
"""Of the tensor-parallel group that a layer is split for."""


def describe(
    model: nn.Module,
    batch: Any,
    training: Training | str | None = None,
    *,
    name: str | None = None,
    loss: OwnLoss | None = None,
    inputs: InputsFunction | None = None,
) -> ModelSpec:
    """The model as the planner sees it, trained that way on samples like the first of ``batch``.

    ``batch``, ``loss`` and ``inputs``: as for :func:`galvatron.parallelize`. ``training``: how it is trained, or its
    precision alone ("bf16"). The model may be on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model: {model!r} given; expected a torch.nn.Module, such as a stock model")
    if batch is None:
        raise InvalidInput("batch: None given; expected one such as the model trains on, with its labels")
    if isinstance(training, str):
        if training not in [*Precision]:
            raise InvalidInput(f"precision: {training!r} given; expected one of {', '.join(Precision)}")
        training = Training(precision=Precision(training))
    training = Training() if training is None else training
    model = with_buffers(as_stock(model))
    own = own_module(model, batch, loss, inputs)
    named = name or type(model).__name__
    if own is None:
        return _Description(model, batch, training, loss).spec(named)
    return _Description(own.model, own.example, training, own.loss).spec(named)


class _Description:
    """A model that is being described."""

    def __init__(self, model: nn.Module, batch: Batch, training: Training, loss: OwnLoss | None) -> None:
        self._model, self._batch, self._training, self._loss = model, batch, training, loss
        self._dtype = torch.bfloat16 if training.precision is Precision.BF16 else torch.float32
        self._sample = {key: own.cpu() for key, own in batch.items()}

    def spec(self, name: str) -> ModelSpec:
        layered = self._layered()
        self._sample = {key: own[:1] for key, own in layered.by_rows(self._sample).items()}
        whole = self._trace(layered, None)
        halves = self._split(layered)
        tokens = self._sample["input_ids"].shape[1] if "input_ids" in self._sample else None
        token = image_token(getattr(self._model, "config", None)) if PIXELS in self._sample else None
        seen = None if token is None or not tokens else int((self._sample["input_ids"] == token).sum())
        counted: set[nn.Parameter] = set()
        kinds: dict[str, LayerSpec] = {}
        for index, layer in enumerate(layered.layers):
            own = set(layer.parameters())
            if layer.kind not in kinds:
                tied = sum(parameter.numel() for parameter in own & counted)
                message = whole[layer.kind].message
                tensor = layered.tensor_parallel(layer, boundary_bytes=message, tokens=tokens) if halves else None
                spec = _spec(layer, whole[layer.kind], halves.get(layer.kind), tensor, tied)
                context = context_facts(layered, index, tokens, whole[layer.kind].attention_flops, self._training)
                kinds[layer.kind] = replace(spec, context=context)
            counted |= own
        say_undivided(layered, tokens)
        model = ModelSpec(
            name=name,
            family="generic",
            layers=tuple(kinds[layer.kind] for layer in layered.layers),
            training=replace(self._training, sequence_length=tokens, image_tokens=seen) if tokens else self._training,
            config=_config(self._model),
        )
        frozen = frozen_parts(self._model)
        if not frozen:
            return model
        as_given = Generic(without_weights(self._model, self._dtype).train(), self._batch, self._loss)
        return tuned(model, as_given, replace(model.training, freeze=frozen))

    def _layered(self) -> Generic:
        """With all parameters trained: what frozen ones leave out is taken out of the figures later."""
        return Generic(without_weights(self._model, self._dtype).train().requires_grad_(True), self._batch, self._loss)

    def _split(self, layered: Generic) -> dict[str, Traced]:
        """What one of two tensor-parallel ranks has of each kind; empty: there is no tensor parallelism."""
        kind, rules = type(self._model).__name__, layered.tensor_rules
        # Where transformers has no plan of the model, nobody expects what a guess would have given.
        say = _LOG.warning if plan_of(self._model) else _LOG.debug
        if rules.refused:
            say("%s: no tensor parallelism is offered, because %s", kind, rules.refused)
        if not rules.blocks:
            return {}
        whole, divided = split_problems(self._model, self._training, rules)
        if whole is not None:
            say("%s: no tensor parallelism is offered, because %s", kind, whole)
            return {}
        if divided is not None:
            say("%s: no sequence parallelism is offered, because %s", kind, divided)
            layered.tensor_rules = replace(rules, divisible=frozenset())
        try:
            return self._trace(self._layered(), LoneGroup(_RANKS))
        except InvalidInput as problem:  # a hook, or dropout of an adapter, which the tiny copy does not have
            say("%s: no tensor parallelism is offered, because %s", kind, problem)
            return {}

    def _trace(self, layered: Generic, group: LoneGroup | None) -> dict[str, Traced]:
        """The first layer of each kind, run."""
        context = layered.context(self._sample, self._dtype)
        first = {layer.kind: layer for layer in reversed(layered.layers)}
        *_, head = layered.layers
        if group is not None:
            for layer in first.values():
                if layer.rules:
                    split(layer, layer.rules, TensorGroup(group=group))
        # No layer is compiled where the loss has a term from inside experts (galvatron.runtime.assembly).
        compiled = self._training.compile and not layered.wide_activations
        traced: dict[str, Traced] = {}
        named, decided = _named_failures(type(self._model).__name__), Decided()  # type: ignore[no-untyped-call]
        # Where images go follows from the numbers of tokens and sizes of images, so these keep their values.
        real = RealIntegers() if PIXELS in context.batch else None  # type: ignore[no-untyped-call]
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, named, decided, real or nullcontext():
            _give_values(first.values())
            calls = [call if call is None else faked(call, fake, real) for call in context.calls]
            values = {key: faked_tensor(own, fake, real) for key, own in context.batch.items()}
            fakes = replace(context, batch=values, calls=tuple(calls))
            given = {storage_of(own) for own in tensors_in([(call.args, call.kwargs) for call in calls if call])}
            activations: Activations = ()
            for layer in (own for own in layered.layers if first[own.kind] is own):
                if layer is head or (activations and isinstance(layer, Bridge)):
                    layer(activations, fakes)  # so that the stand-ins for what precedes know their shapes
                made, traced[layer.kind] = trace(layer, activations, fakes, given, compiled=compiled)
                if layer is head:
                    # What enters it is what counts: it hands on a loss.
                    boundary, message = sizes(activations)
                    traced[layer.kind] = replace(traced[layer.kind], boundary=boundary, message=message)
                elif isinstance(layer, Embedding | Bridge):  # blocks hand on what they were given
                    activations = tuple(own.detach().requires_grad_() for own in made)
        return traced


def _spec(layer: Layer, whole: Traced, half: Traced | None, tensor: TensorParallel | None, tied: int) -> LayerSpec:
    if half is None or tensor is None:
        half, tensor = whole, None
    saved = _divided(whole.saved, half.saved)
    spec = LayerSpec(
        name=layer.kind,
        parameters=whole.parameters,
        tied_parameters=tied,
        replicated_parameters=whole.parameters - _divided(whole.parameters, half.parameters),
        forward_flops=whole.flops,
        replicated_flops=0 if tensor is None else whole.flops - _divided(whole.flops, half.flops),
        split_activation_bytes=saved,
        replicated_activation_bytes=whole.saved - saved,
        boundary_bytes=whole.boundary,
        # Backward holds the gradients of what the operation made and took, and (in a softmax) half as much again, while
        # the gradient of the boundary waits.
        transient_bytes=whole.largest * 3 // 2 + whole.boundary,
        tensor_parallel=tensor,
    )
    return replace(
        spec,
        experts=_experts(layer, spec, whole.experts, half.experts),
        fused_loss=_fused_loss(layer, whole),
        selective=_kept_facts(Grade.PRODUCTS, whole, half, tensor),
        but_attention=_kept_facts(Grade.ATTENTION, whole, half, tensor),
    )


def _kept_facts(grade: Grade, whole: Traced, half: Traced, tensor: TensorParallel | None) -> Kept | None:
    """What is kept where all but some results are recomputed. With TP a block's reductions are kept as well, but for
    the last of them, whose result only the next layer reads."""
    if grade not in whole.kept:
        return None
    size, flops = whole.kept[grade]
    split = 0 if tensor is None else _divided(size, half.kept.get(grade, (size, 0))[0])
    sent = 0 if tensor is None or grade is Grade.PRODUCTS else max(tensor.forward_collectives - 1, 0) * whole.message
    return Kept(split_bytes=split, replicated_bytes=size - split, sent_bytes=sent, flops=flops)


def _fused_loss(layer: Layer, whole: Traced) -> FusedLoss | None:
    """Log-probabilities in fp32 are what a head then does not save."""
    if layer.projection is None:
        return None
    weight = layer.get_parameter(f"{layer.projection}.weight")
    words, width = weight.shape
    logits = whole.message // (width * weight.element_size()) * words
    saved = logits * Precision.FP32.bytes
    return FusedLoss(logits=logits, saved_bytes=saved, parameters=weight.numel(), words=words)


def _divided(all_: int, of_one: int) -> int:
    """The part of a figure that is halved on one of two ranks."""
    return min(max(_RANKS * (all_ - of_one) // (_RANKS - 1), 0), all_)


def _experts(layer: Layer, spec: LayerSpec, whole: Inside | None, half: Inside | None) -> Experts | None:
    """What the planner needs to know of a layer's experts; None: it has none that can be divided."""
    rule = layer.experts
    if rule is None or whole is None or half is None:
        return None
    module = layer.get_submodule(rule.path)
    if spec.tensor_parallel is not None and any(
        isinstance(own, Summed) and rule.path.startswith(f"{own.path}.") for own in layer.rules
    ):
        return None  # TP would sum what experts with axes of their own made once already
    tables = expert_tables(layer, rule)
    saved = _divided(whole.saved, half.saved)
    collectives = 0 if spec.tensor_parallel is None else 1
    return Experts(
        count=rule.count,
        parameters=sum(own.numel() for own in module.parameters()),
        forward_flops=whole.flops,
        # Parts of the layer's, whatever rounding says.
        activation_bytes=min(saved, spec.split_activation_bytes),
        replicated_activation_bytes=min(whole.saved - saved, spec.replicated_activation_bytes),
        dispatch_bytes=whole.dispatch,
        # No degree of TP but 1 divides experts of which TP cannot split everything.
        divides=tuple(sorted({own.features(layer.get_parameter(own.path).shape[own.dim]) for own in tables or ()}))
        or (1,),
        forward_collectives=collectives,
        backward_collectives=collectives,
    )


@contextmanager
def _named_failures(name: str) -> Iterator[None]:
    """A model that computes with values, which fake tensors do not have, cannot be described."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise InvalidInput(
            f"{name}: the shape of what its operation {error.func} returns depends on values, so the model cannot be "
            "traced without them; describe its layers in a .toml file (docs/models.md)"
        ) from None
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidInput(
            f"{name}: cannot be traced with tensors that have shapes but no values ({reason}); describe its layers in "
            "a .toml file (docs/models.md)"
        ) from None


def _config(model: nn.Module) -> dict[str, Any] | None:
    """What builds the model again, if it is one of Hugging Face's."""
    config = getattr(model, "config", None)
    if config is None or not type(model).__module__.startswith("transformers."):
        return None
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return {**content, "architectures": [type(model).__name__]}


def _give_values(layers: Iterable[Layer]) -> None:
    """Fake parameters in the place of meta ones; shared ones stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for layer in layers for module in layer.modules()):
        for name, own in list(module.named_parameters(recurse=False)):
            if own.is_meta and own not in made:
                made[own] = nn.Parameter(torch.empty(own.shape, dtype=own.dtype), requires_grad=own.requires_grad)
            setattr(module, name, made.get(own, own))
