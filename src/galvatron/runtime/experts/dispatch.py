"""Expert parallelism of one layer: its stock module of experts keeps some of them, and tokens come to these from all
ranks of the group.

What happens, and what backward does instead:

    slice      of tokens that TP ranks share, each takes its part        all-gather
    f          where TP splits the experts themselves                    all-reduce
    all-to-all copies of the tokens to the ranks of their experts        all-to-all
    experts    the stock module's own forward, each copy for one expert
    all-to-all outputs to the tokens' own ranks                          all-to-all
    sum        of a token's outputs, weighted by the router
    g          all-reduce of what the split experts made
    all-gather the tokens of TP ranks                                    slice

The router's weights are applied on the token's own rank, so that the router's gradient is complete there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import Layer
from galvatron.families.rules import DividedExperts, Rule, Table
from galvatron.runtime.data_parallel.shards import TensorSplit
from galvatron.runtime.experts.exchange import Routing, exchange, gather_tokens, slice_tokens
from galvatron.runtime.tensor_parallel import operators
from galvatron.runtime.tensor_parallel.split import cut

__all__ = ["ExpertGroups", "divide", "expert_tables", "in_experts"]

_ALIGNED_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """The ranks that work together on the experts of a layer."""

    dispatch: ProcessGroup
    """They have all experts together."""
    tensor: ProcessGroup | None = None
    """They have a part each of the same experts, and the same tokens."""
    slices: ProcessGroup | None = None
    """They have the same tokens, and divide them."""


def in_experts(rule: Rule, experts: DividedExperts) -> bool:
    """Whether a tensor-parallel rule is about the experts, which may have axes of their own."""
    return f"{rule.path}.".startswith(f"{experts.path}.")


def expert_tables(layer: Layer, experts: DividedExperts) -> tuple[Table, ...] | None:
    """How tensor parallelism splits each parameter of the experts; None: not all of them can be split."""
    wanted = [f"{experts.path}.{name}" for name in experts.parameters]
    tables = {rule.path: rule for rule in layer.rules if isinstance(rule, Table) and rule.path in wanted}
    return tuple(tables.values()) if len(tables) == len(wanted) else None


def divide(layer: Layer, experts: DividedExperts, groups: ExpertGroups) -> dict[str, tuple[TensorSplit, ...]]:
    """Leave a layer this rank's experts, and let its tokens travel. Returns how each of their parameters is split."""
    module: Any = layer.get_submodule(experts.path)
    compute = type(module).forward
    done: dict[str, tuple[TensorSplit, ...]] = {}
    for name in experts.parameters:
        whole = f"{experts.path}.{name}"
        split = TensorSplit(dim=0, index=groups.dispatch.rank(), degree=groups.dispatch.size())
        cut(layer, whole, split)
        done[whole] = (split,)
    if groups.tensor is not None:
        tables = expert_tables(layer, experts)
        assert tables is not None
        for rule in tables:
            features = TensorSplit(rule.dim, groups.tensor.rank(), groups.tensor.size(), rule.parts)
            cut(layer, rule.path, features)
            done[rule.path] = (*done[rule.path], features)
    module.num_experts = experts.count // groups.dispatch.size()
    module.forward = _Dispatch(weakref.ref(module), compute, experts, groups)
    return done


class _Dispatch:
    """Stands for the forward of a module of experts."""

    def __init__(
        self,
        module: weakref.ref[nn.Module],
        compute: Callable[..., Tensor],
        experts: DividedExperts,
        groups: ExpertGroups,
    ) -> None:
        """``module`` is held weakly, because it holds this; ``compute``: the stock forward."""
        self._module, self._compute, self._experts, self._groups = module, compute, experts, groups

    def __call__(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, -2)
        if chosen.ndim != 2 or chosen.shape != weights.shape or len(chosen) != len(tokens):
            raise InvalidInput(
                f"{self._experts.path}: experts {list(chosen.shape)} with weights {list(weights.shape)} are chosen for "
                f"{len(tokens)} tokens; expected the same number for each token, which expert parallelism needs"
            )
        slices, tensor = self._groups.slices, self._groups.tensor
        count = len(tokens)
        if slices is not None:
            tokens, chosen, weights = (slice_tokens(own, slices) for own in (tokens, chosen, weights))
        if tensor is not None:
            tokens, weights = (operators.copy_to_region(own, tensor) for own in (tokens, weights))
        combined = self._dispatched(tokens, chosen, weights)
        if tensor is not None:
            combined = operators.reduce_from_region(combined, tensor)
        if slices is not None:
            combined = gather_tokens(combined, count, slices)
        # No view: stock code may add to it in place, and FSDP2's hooks on it would then be lost.
        return combined if combined.shape == hidden_states.shape else combined.view(hidden_states.shape).clone()

    def _dispatched(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        group = self._groups.dispatch
        routing = Routing.of(chosen, self._experts.count, group)
        copies = exchange(tokens[routing.order // chosen.shape[1]], routing.sent, routing.received, group)
        outputs = exchange(self._outputs(copies, routing.experts), routing.received, routing.sent, group)
        back = torch.empty_like(routing.order)
        back[routing.order] = torch.arange(len(back), device=back.device)
        by_token = outputs[back].view(*chosen.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def _outputs(self, copies: Tensor, experts: Tensor) -> Tensor:
        """Of this rank's experts, one for each copy."""
        if not len(copies):
            # All ranks sum gradients, so a rank without tokens needs some too: those of a token of zeros, which nobody
            # gets.
            none = experts.new_zeros(1)
            return self._outputs(copies.sum(0, keepdim=True), none)[:0]
        module = self._module()
        assert module is not None
        compute = self._compute if _grouped(module) else inspect.unwrap(self._compute)
        return compute(module, copies, experts[:, None], torch.ones_like(copies[:, :1]))


def _grouped(module: nn.Module) -> bool:
    """Whether the stock forward may compute experts by grouped products, as it does unless it is told otherwise: these
    know no fp64, and want rows of multiples of 16 bytes. Else its loop over experts does."""
    return all(
        own.dtype != torch.float64 and all(size * own.itemsize % _ALIGNED_BYTES == 0 for size in own.shape[1:])
        for own in module.parameters()
    )
