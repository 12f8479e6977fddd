"""Whether tensor parallelism splits a model rightly: a tiny copy on two simulated ranks beside the stock model.

The planner offers TP for a model outside the tested families only where this finds no difference. It takes a second or
two and no other process.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.build import without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.tensor_rules import TensorRules
from galvatron.families.layer import Activations, Batch
from galvatron.families.shallow import shallow_config
from galvatron.families.tiny import tiny_config
from galvatron.families.weights import ModelWeights
from galvatron.runtime.data_parallel.making import set_everywhere
from galvatron.runtime.data_parallel.shards import ParameterShard, TensorSplit
from galvatron.runtime.randomness import restored
from galvatron.runtime.tensor_parallel import operators
from galvatron.runtime.tensor_parallel.simulated import simulate
from galvatron.runtime.tensor_parallel.split import SplitParameters, TensorGroup, split
from galvatron.runtime.trial import NotChecked, random_model, tiny_copy, trial_batches
from galvatron.runtime.verify import FP32, FP64, Tolerance, judged, one_process

__all__ = ["split_difference", "split_problems"]

_RANKS = 2
_SIZE = (2, 16)
"""Rows and tokens of a trial batch."""
_FAILURES = (InvalidInput, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)


def split_problems(model: nn.Module, training: Training, rules: TensorRules) -> tuple[str | None, str | None]:
    """Why the model's tensor-parallel rules must not be used, and why not together with sequence parallelism; None:
    they may be."""
    sequence = bool(rules.divisible)  # else there is one thing to try
    divided = split_difference(model, training, rules, sequence=sequence)
    return (split_difference(model, training, rules) if divided is not None and sequence else divided), divided


_PASSED: set[Hashable] = set()
"""What was found to be right in this process, which describes, plans and checks a model."""


def split_difference(
    model: nn.Module, training: Training, rules: TensorRules | None = None, *, sequence: bool = False
) -> str | None:
    """Why tensor parallelism (with sequence parallelism where layers allow it) must not be used; None: it may be.
    ``rules``: the model's own, where they may not be those of a tiny copy."""
    config = getattr(model, "config", None)  # all that a tiny copy is made of
    own = None if rules is None else (tuple(rules.blocks.items()), rules.divisible, rules.guessed)
    kinds = frozenset((type(module), type(module).forward) for module in model.modules())  # classes may be patched
    key = kinds, repr(config and sorted(vars(config).items(), key=str)), training, own, sequence
    if key in _PASSED:
        return None
    found = _tried(model, training, rules, sequence=sequence)
    if found is None:
        _PASSED.add(key)
    return found


def _tried(model: nn.Module, training: Training, rules: TensorRules | None, *, sequence: bool) -> str | None:
    cpu = torch.device("cpu")
    with restored(cpu, host=True), torch.enable_grad():
        try:
            small = _small(model, training)
            with suppress(*_FAILURES):  # some models compute in no other type than fp32
                return _difference(_wide(small), FP64, rules, sequence=sequence)
            return _difference(small, FP32, rules, sequence=sequence)
        except NotChecked as reason:
            return f"it cannot be tried out: {reason}"
        except _FAILURES as error:
            return f"a tiny copy fails when it is split ({str(error).partition(chr(10))[0]})"


def _difference(small: nn.Module, tolerance: Tolerance, rules: TensorRules | None, *, sequence: bool) -> str | None:
    dtype = next(own.dtype for own in small.parameters() if own.is_floating_point())
    models = [Generic(without_weights(small)) for _ in range(_RANKS)]
    if rules is not None and not rules.proven_by(models[0].tensor_rules):
        raise ValueError("it is split otherwise than the model")
    batches = {
        name: {key: own.to(dtype) if own.is_floating_point() else own for key, own in drawn.items()}
        for name, drawn in trial_batches(models[0], small, _SIZE).items()
    }
    answers = [one_process(small, batch, None, torch.device("cpu")) for batch in batches.values()]
    if not all(bool(own.isfinite().all()) for answer in answers for own in answer.gradients.values()):
        raise ValueError("gradients of the whole one are not finite")

    def run(group: ProcessGroup) -> list[_Share]:
        rank = _Rank(models[group.rank()], small, group, sequence=sequence)
        return [rank.run(batch) for batch in batches.values()]

    for name, answer, *shares in zip(batches, answers, *simulate(_RANKS, run), strict=True):
        wrong = judged(answer, shares[0].loss, _put_together(shares), tolerance)
        if wrong is not None:
            return f"a tiny copy that is split differs from the whole one. Of a {name} batch {wrong}"
    return None


def _wide(small: nn.Module) -> nn.Module:
    """The same in fp64, where rounding hides less. Grouped products of experts do not know it, their loop does."""
    wide = copy.deepcopy(small).double()
    choose = getattr(wide, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")
    return wide


def _small(model: Any, training: Training) -> nn.Module:
    """A tiny copy, of a few blocks where the architecture can be cut so."""
    if not type(model).__module__.startswith("transformers."):
        raise NotChecked("it is no Hugging Face model, of which a tiny copy could be built")
    with suppress(*_FAILURES, NotChecked):
        shallow = random_model(type(model), tiny_config(shallow_config(model.config), degree=_RANKS), training)
        Generic(without_weights(shallow))
        return shallow
    return tiny_copy(model, _RANKS, training)


@dataclass(frozen=True)
class _Share:
    """What one rank found."""

    loss: float
    gradients: dict[str, tuple[ParameterShard, Tensor]]
    """By stock name."""


def _put_together(shares: Sequence[_Share]) -> Iterator[tuple[str, Tensor]]:
    for name, (shard, gradient) in shares[0].gradients.items():
        if not shard.splits:
            yield name, gradient
            continue
        whole = torch.zeros(shard.shape, dtype=gradient.dtype)
        for share in shares:
            own, part = share.gradients[name]
            own.put(part, whole)
        yield name, whole


class _Rank:
    """One rank's layers."""

    def __init__(self, layered: Generic, small: nn.Module, group: ProcessGroup, *, sequence: bool) -> None:
        self._layered, self._group = layered, group
        self._divided = [
            sequence and layer.kind in layered.tensor_rules.divisible and bool(layer.rules) for layer in layered.layers
        ]
        self._done: list[SplitParameters] = []
        self._shapes: list[dict[str, tuple[int, ...]]] = []
        weights = ModelWeights(layered, small)
        self._dtype = next(own.dtype for own in small.parameters() if own.is_floating_point())
        # Drawn in fp32, so nothing is lost on the way through it.
        values = [
            {name: own.to(self._dtype) for name, own in weights.tensors(index).items()}
            for index in range(len(layered.layers))
        ]
        for layer, own, divided in zip(layered.layers, values, self._divided, strict=True):
            done = (
                split(layer, layer.rules, TensorGroup(group=group, sequence=divided))
                if layer.rules
                else SplitParameters(splits={})
            )
            for name, parameter in list(layer.named_parameters()):
                shard = ParameterShard(tuple(own[name].shape), _splits(done, name))
                local = nn.Parameter(shard.take(own[name]).clone(), requires_grad=parameter.requires_grad)
                set_everywhere(layer, parameter, local)
            self._done.append(done)
            self._shapes.append({name: tuple(value.shape) for name, value in own.items()})

    def run(self, batch: Batch) -> _Share:
        """The loss of a batch and the gradients of what this rank holds."""
        for layer in self._layered.layers:
            layer.zero_grad()
        context = self._layered.context(batch, self._dtype)
        activations: Activations = ()
        before = False
        for layer, divided in zip(self._layered.layers, self._divided, strict=True):
            activations = tuple(self._changed(own, before, divided) for own in activations)
            activations, before = layer(activations, context), divided
        count = max(self._layered.targets(batch), 1)
        loss, *terms = activations
        mean = sum(terms, start=loss / count)
        torch.autograd.backward(mean)
        return _Share(float(mean.detach()), self._gradients())

    def _changed(self, tensor: Tensor, before: bool, after: bool) -> Tensor:
        if before == after:
            return tensor
        change = operators.slice_sequence if after else operators.gather_sequence
        return change(tensor, self._group)

    def _gradients(self) -> dict[str, tuple[ParameterShard, Tensor]]:
        """Uses of a tied weight are added up, and what is partial is summed."""
        owners = {use: tie.uses[0] for tie in self._layered.ties for use in tie.uses}
        found: dict[str, tuple[ParameterShard, Tensor]] = {}
        for index, layer in enumerate(self._layered.layers):
            tied = {use.name: owner for use, owner in owners.items() if use.layer == index}
            for name, parameter in layer.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                cut = _splits(self._done[index], name)
                if not cut and (self._divided[index] or name in self._done[index].partial):
                    self._group.allreduce([gradient])
                owner = tied.get(name)
                stock = layer if owner is None else self._layered.layers[owner.layer]
                key = stock.stock_name(name if owner is None else owner.name)
                shard = ParameterShard(self._shapes[index][name], cut)
                if key in found:
                    gradient = found[key][1] + gradient
                found[key] = shard, gradient
        return found


def _splits(done: SplitParameters, name: str) -> tuple[TensorSplit, ...]:
    return (done.splits[name],) if name in done.splits else ()
