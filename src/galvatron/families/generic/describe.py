"""What the planner needs to know of a model without a family: sizes and work of its three kinds of layers.

Each kind runs once on one sample with fake tensors: they have shapes but no values, so that it takes neither memory nor
time, whatever the model's size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import LayerSpec, ModelSpec, Precision, Training
from galvatron.families.build import without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.stubs import GROUPED, Call
from galvatron.families.layer import Activations, Batch, Layer

__all__ = ["describe"]


def describe(model: nn.Module, batch: Batch, training: Training | None = None, *, name: str | None = None) -> ModelSpec:
    """The model as the planner sees it, trained that way on samples like the first of ``batch``."""
    training = Training() if training is None else training
    dtype = torch.float32 if training.precision is Precision.FP32 else torch.bfloat16
    layered = Generic(without_weights(model, dtype).train(), batch)
    sample = {key: own[:1].cpu() for key, own in batch.items()}
    context = layered.context(sample, dtype)
    embedding, *blocks, head = layered.layers
    _refuse_unequal(type(model).__name__, blocks)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _give_values(layered.layers)
        fakes = replace(
            context,
            batch={key: fake.from_tensor(own) for key, own in sample.items()},
            calls=tuple(_faked(call, fake) for call in context.calls),
        )
        given = {_storage(own) for own in _tensors([(call.args, call.kwargs) for call in fakes.calls])}
        with _named_failures(type(model).__name__):
            hidden, first = _measure(embedding, (), fakes, given)
            hidden = hidden.detach().requires_grad_()
            boundary = _bytes(hidden)
            _, middle = _measure(blocks[0], (hidden,), fakes, given)
            head((hidden,), fakes)  # so that the stand-ins for what precedes know their shapes and do no work below
            _, last = _measure(head, (hidden,), fakes, given)
    seen: set[nn.Parameter] = set()
    specs = []
    for layer, work in ((embedding, first), *((block, middle) for block in blocks), (head, last)):
        own = set(layer.parameters())
        count = sum(parameter.numel() for parameter in own)
        specs.append(
            LayerSpec(
                name=layer.kind,
                parameters=count,
                tied_parameters=sum(parameter.numel() for parameter in own & seen),
                replicated_parameters=count,
                forward_flops=work.flops,
                split_activation_bytes=0,
                replicated_activation_bytes=work.saved,
                boundary_bytes=boundary,
                # Backward holds the gradients of what the operation made and took, and (in a softmax) half as much
                # again, while the gradient of the boundary waits.
                transient_bytes=work.largest * 3 // 2 + boundary,
            )
        )
        seen |= own
    return ModelSpec(
        name=name or type(model).__name__,
        family="generic",
        layers=tuple(specs),
        training=training,
        config=_config(model),
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


def _refuse_unequal(name: str, blocks: Iterable[Layer]) -> None:
    counts = {sum(own.numel() for own in block.parameters()) for block in blocks}
    if len(counts) > 1:
        raise InvalidInput(
            f"{name}: its blocks have {' or '.join(map(str, sorted(counts)))} parameters; expected equal ones, "
            "which is all that the generic cut can describe"
        )


def _give_values(layers: Iterable[Layer]) -> None:
    """Fake parameters in the place of meta ones; shared ones stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for layer in layers for module in layer.modules()):
        for name, own in list(module.named_parameters(recurse=False)):
            if own.is_meta and own not in made:
                made[own] = nn.Parameter(torch.empty(own.shape, dtype=own.dtype), requires_grad=own.requires_grad)
            setattr(module, name, made.get(own, own))


def _faked(call: Call, fake: FakeTensorMode) -> Call:
    args, kwargs = tree_map(
        lambda own: fake.from_tensor(own) if isinstance(own, Tensor) else own, (call.args, call.kwargs)
    )
    return Call(call.block, args, kwargs)


class _Work(TorchDispatchMode):
    """What a forward pass does: operations, bytes saved for backward, bytes of its largest operation in and out."""

    def __init__(self, parameters: Iterable[Tensor], given: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        """At first of experts alone: torch's counter knows the others."""
        self.largest = 0
        self._left_out = given | {_storage(own) for own in parameters}
        self._saved: dict[int, Tensor] = {}

    @property
    def saved(self) -> int:
        return sum(own.untyped_storage().nbytes() for own in self._saved.values())

    def pack(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._left_out:
            self._saved.setdefault(_storage(tensor), tensor)
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self._experts(*args) if str(function) in GROUPED else function(*args, **(kwargs or {}))
        taken = {_storage(own): own for own in _tensors((args, kwargs))}
        new = [own for own in _tensors(made) if _storage(own) not in taken]
        if new:
            inputs = [own for place, own in taken.items() if place not in self._left_out]
            self.largest = max(self.largest, sum(_bytes(own) for own in (*new, *inputs) if own.is_floating_point()))
        return made

    def _experts(self, rows: Tensor, weights: Tensor, *_: Any) -> Tensor:
        """Each row times the matrix of its expert: torch has neither shapes for all types nor counts for it."""
        self.flops += 2 * rows.numel() * weights.shape[-1]
        return rows.new_empty(*rows.shape[:-1], weights.shape[-1])


def _tensors(values: Any) -> list[Tensor]:
    return [own for own in tree_flatten(values)[0] if isinstance(own, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention_flops(
    query: list[int], key: list[int], value: list[int], dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """Of the fused kernel on CPUs, which torch's counter does not know: two products, half of each if causal."""
    *heads, queries, width = query
    return 2 * math.prod(heads) * queries * key[-2] * (width + value[-1]) // (2 if causal else 1)


_FUSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def _measure(layer: Layer, activations: Activations, context: Any, given: set[int]) -> tuple[Tensor, _Work]:
    work = _Work(layer.parameters(), given)
    counter = FlopCounterMode(display=False, custom_mapping=_FUSED)
    with counter, saved_tensors_hooks(work.pack, lambda own: own), work:
        (made,) = layer(activations, context)
    work.flops += counter.get_total_flops()
    return made, work
