"""A module of the user's own, with batches in the user's own form, as the runtime knows models.

The runtime divides named tensors by samples and calls ``model(**named)``. Here a batch of any form (a dictionary, a
tuple, nested) gets names, and the module a forward that takes them: it puts the user's form together again, calls the
module as the user would, and names what it returns.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from galvatron.core.errors import InvalidInput
from galvatron.families.build import without_weights
from galvatron.families.layer import IGNORED

__all__ = ["InputsFunction", "OwnLoss", "OwnModule", "check_sum", "own_module"]

InputsFunction = Callable[[Any], Any]
"""From the user's batch to what the module is called with: keywords (a dictionary), arguments (a tuple), or one."""
OwnLoss = Callable[[Any, Any], Tensor]
"""From the module's output and the user's batch to the loss, summed over the targets or samples."""

_LABELS = "labels"
_HELD_LABELS = "given_labels"
"""Of a batch that goes through ``inputs=``: the runtime itself calls no forward with labels."""
_OTHER_LABELS = (_HELD_LABELS, "targets", "target", "label", "y")
"""What modules that return their loss call the labels."""
_ROUNDING = 1e-3


@dataclass(frozen=True)
class OwnModule:
    """A module in the form that the runtime takes, and how batches come to it."""

    model: nn.Module
    """The user's, with the same parameters under the same names."""
    example: dict[str, Tensor]
    loss: OwnLoss | None
    """Of its output and of named tensors."""
    named: Callable[[Any], dict[str, Tensor]]
    """A user's batch as named tensors."""


def own_module(
    model: nn.Module, example: Any, loss: OwnLoss | None = None, inputs: InputsFunction | None = None
) -> OwnModule | None:
    """None: a stock model and a dictionary of tensors, which need no other form."""
    stock = type(model).__module__.startswith("transformers.")
    if inputs is None and (example is None or (stock and _is_flat(example))):
        return None
    if example is None:
        raise InvalidInput(
            f"{type(model).__name__}: inputs= needs a batch to try it out; give one of the batches as example="
        )
    form = _Form.of(model, example, inputs, labelled=loss is None)
    dressed = _dressed(model, form)
    named_loss = None if loss is None else _named_loss(loss, form)
    return OwnModule(dressed, form.named(example), named_loss, form.named)


@dataclass(frozen=True)
class _Form:
    """The user's batches: their structure, and the names of the tensors in it."""

    spec: TreeSpec
    names: tuple[str, ...]
    inputs: InputsFunction | None
    taken: tuple[str, ...]
    """What the module's own forward takes."""
    labels: str | None
    """Which of them are the labels; None: there are none, and each sample is a target."""
    ignored: int
    """The label of positions that the module's own loss leaves out."""
    labelled: bool
    """Whether the loss is that of logits against labels, not one of the user's own."""

    @classmethod
    def of(cls, model: nn.Module, example: Any, inputs: InputsFunction | None, *, labelled: bool) -> _Form:
        leaves, spec = tree_flatten(_as_plain(example))
        parameters = inspect.signature(model.forward).parameters.values()
        taken = tuple(own.name for own in parameters if own.kind in (own.POSITIONAL_OR_KEYWORD, own.KEYWORD_ONLY))
        kind = type(model).__name__
        for own in leaves:
            if not isinstance(own, Tensor) or not own.ndim:
                raise InvalidInput(
                    f"batch: has a {type(own).__name__} in it ({str(own)[:40]}); expected tensors with the samples "
                    f"first; give inputs= a function that adds to the batch what else {kind} takes"
                )
        if _is_flat(example):
            names = tuple(_HELD_LABELS if inputs and key == _LABELS else str(key) for key in spec.context)
        elif inputs is None and isinstance(example, tuple | list) and len(leaves) == len(example) <= len(taken):
            names = taken[: len(leaves)]
        elif inputs is None and isinstance(example, Tensor):
            names = taken[:1]
        elif inputs is None:
            raise InvalidInput(
                f"batch: a {type(example).__name__} of {len(leaves)} tensors, but {kind}.forward takes "
                f"({', '.join(taken)}); give inputs=, a function from the batch to what the model is called with"
            )
        else:
            names = tuple(f"item_{number}" for number in range(len(leaves)))
        if inputs is None and not set(names) & set(taken):
            raise InvalidInput(
                f"batch: has {', '.join(names)}, none of which {kind}.forward takes ({', '.join(taken)}); give "
                "inputs=, a function from the batch to what the model is called with"
            )
        labels = _LABELS if _LABELS in names else next((name for name in _OTHER_LABELS if name in names), None)
        if labelled and labels is None:
            raise InvalidInput(
                f"{kind}: which tensor of the batch holds the labels is not known (it has {', '.join(names)}); name it "
                "'labels', or give loss=, a function of the model's output and the batch"
            )
        known = labels if labelled or labels in (_LABELS, _HELD_LABELS) else None
        ignored = IGNORED if known is None or inputs is not None else _ignored_by(model, names, taken, leaves)
        return cls(spec, names, inputs, taken, known, ignored, labelled)

    def named(self, batch: Any) -> dict[str, Tensor]:
        leaves, spec = tree_flatten(_as_plain(batch))
        if spec != self.spec:
            raise InvalidInput(f"batch: has the form {_shown(spec)}; expected that of the example, {_shown(self.spec)}")
        found = dict(zip(self.names, leaves, strict=True))
        rows = len(leaves[0])
        if self.labels is None:
            return {**found, _LABELS: torch.zeros(rows, dtype=torch.int64, device=leaves[0].device)}
        labels = found[self.labels]
        return {**found, _LABELS: labels if self.ignored == IGNORED else labels.where(labels != self.ignored, IGNORED)}

    def batch(self, named: Mapping[str, Tensor]) -> Any:
        """The user's form again."""
        return tree_unflatten([named[name] for name in self.names], self.spec)

    def arguments(self, named: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with."""
        if self.inputs is None:
            return (), {name: own for name, own in named.items() if name in self.taken}
        made = self.inputs(self.batch(named))
        if isinstance(made, Mapping):
            return (), dict(made)
        return (tuple(made), {}) if isinstance(made, tuple | list) else ((made,), {})


def _dressed(model: nn.Module, form: _Form) -> nn.Module:
    """The module itself, of a class whose forward takes named tensors; it shares all that the module has."""
    own_class: Any = type(model)

    def forward(self: Any, **named: Tensor) -> Any:
        if form.labels is not None and form.labels != _LABELS:
            given = named.pop(_LABELS, None)
            if given is not None:
                named[form.labels] = given.where(given != IGNORED, form.ignored)
        args, kwargs = form.arguments(named)
        output = own_class.forward(self, *args, **kwargs)
        return _as_fields(output) if form.labelled else output

    computes_loss = form.labels is not None and (form.inputs is not None or form.labels in form.taken)
    names = dict.fromkeys((*(name for name in form.names if name != _LABELS), *([_LABELS] if computes_loss else [])))
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names),
        ]
    )
    dressed = copy.copy(model)
    content = {"forward": forward, "__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    dressed.__class__ = type(own_class.__name__, (own_class,), content)
    return dressed


def _as_fields(output: Any) -> Any:
    """(logits, loss) with their names; what is returned otherwise is the user's own business."""
    if not isinstance(output, tuple | list) or hasattr(output, "_fields") or not output:
        return output
    scalars = [own for own in output if isinstance(own, Tensor) and own.ndim == 0]
    first = output[0]
    if not isinstance(first, Tensor) or len(scalars) > 1 or first.ndim == 0:
        return output
    fields = {"logits": first, **{f"output_{place}": own for place, own in enumerate(output[1:], 1)}}
    if scalars:
        fields = {name: own for name, own in fields.items() if own is not scalars[0]} | {"loss": scalars[0]}
    return {name: own for name, own in fields.items() if own is not None}


def _named_loss(loss: OwnLoss, form: _Form) -> OwnLoss:
    """Which is given the user's form of a batch."""

    def named(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        made = loss(output, form.batch(batch))
        if not isinstance(made, Tensor) or made.ndim:
            shown = f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise InvalidInput(
                f"loss: returned {shown}; expected one number, the sum over the samples (reduction='sum')"
            )
        return made

    return named


def _as_plain(batch: Any) -> Any:
    """Mappings of other kinds (a tokenizer's ``BatchEncoding``) as dictionaries."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def _shown(spec: TreeSpec) -> str:
    return str(tree_unflatten(["·"] * spec.num_leaves, spec)).replace("'·'", "·")


class _SeesIgnored(TorchFunctionMode):
    """Notes which labels a cross-entropy leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("cross_entropy", "nll_loss"):
            bound = inspect.signature(function).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.found.append(int(bound.arguments["ignore_index"]))
        return function(*args, **(kwargs or {}))


def _ignored_by(model: nn.Module, names: tuple[str, ...], taken: tuple[str, ...], leaves: list[Tensor]) -> int:
    """The label that the module's own loss leaves out, seen in a run without values; PyTorch's where none is seen.
    Whether the loss is the one that is taken for it is tried out later."""
    empty = without_weights(model).to("meta")
    given = {name: own[:1].to("meta") for name, own in zip(names, leaves, strict=True) if name in taken}
    seen = _SeesIgnored()
    try:
        with torch.no_grad(), seen:
            empty(**given)
    except Exception:  # of whatever kind: it comes from the module's own forward
        return IGNORED
    return seen.found[-1] if seen.found else IGNORED


def _is_flat(example: Any) -> bool:
    return isinstance(example, Mapping) and all(isinstance(own, Tensor) for own in example.values())


@torch.no_grad()
def check_sum(own: OwnModule) -> None:
    """Raise :class:`InvalidInput` if the user's loss of two samples is not the sum of theirs: ranks have a part of the
    samples each, and the sum of what they find is what is trained on. Skipped for a module without weights."""
    rows = {name: tensor[:2] for name, tensor in own.example.items()}
    if own.loss is None or any(each.is_meta for each in own.model.parameters()) or len(next(iter(rows.values()))) < 2:
        return
    place = next((each.device for each in own.model.parameters()), torch.device("cpu"))
    taken = inspect.signature(own.model.forward).parameters
    was = {each: each.training for each in own.model.modules()}
    own.model.eval()
    losses = []
    for part in (slice(0, 1), slice(1, 2), slice(0, 2)):
        chosen = {name: tensor[part].to(place) for name, tensor in rows.items()}
        output = own.model(**{name: tensor for name, tensor in chosen.items() if name in taken and name != _LABELS})
        losses.append(float(own.loss(output, chosen)))
    for each, mode in was.items():
        each.training = mode
    first, second, both = losses
    if abs(both - first - second) > _ROUNDING * (abs(first) + abs(second) + 1e-6):
        mean = abs(both - (first + second) / 2) <= _ROUNDING * (abs(first) + abs(second) + 1e-6)
        raise InvalidInput(
            f"loss: of two samples it is {both:.6g}, but of one and of the other {first:.6g} and {second:.6g}: "
            + (
                "it is a mean; return the sum (reduction='sum'), which is divided by the number of targets later"
                if mean
                else "it is no sum over samples, so it cannot be put together from parts of a batch"
            )
        )
