"""Recompute that keeps some results: of matrix products, attention and collectives, or of the last two alone.

What a layer keeps is a rule about operations. Where PyTorch runs them one by one, a dispatch mode keeps results in
forward and gives them back when the layer runs again in backward; what is not kept is computed again. Where a layer is
compiled, the same rule marks the nodes of its graph, and the compiler divides the graph by these marks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Strategy

__all__ = ["SENT", "Grade", "Selective", "grade_of", "is_kept", "keeping", "mark"]

SENT = "sent_"
"""How the names of our own operations begin whose results come from other ranks: they are kept."""


class Grade(StrEnum):
    """What is kept beside a layer's input."""

    PRODUCTS = "products"
    """Results of products with weights, of fused attention and of collectives."""
    ATTENTION = "attention"
    """Results of fused attention and of collectives."""


def grade_of(strategy: Strategy) -> Grade | None:
    """None: all is kept, or nothing."""
    if strategy.selective_recompute:
        return Grade.PRODUCTS
    return Grade.ATTENTION if strategy.recompute_but_attention else None


_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{name}.default"
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
        "flash_attention_for_cpu",
    )
)
# Batched products are those of attention maps: their results are as large as what one wants to get rid of.
_PRODUCTS = frozenset(
    {"aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}
)
_PROJECTIONS = "galvatron.project_"
_OVER_RING = "galvatron.attend_over_ring_"


@cache
def is_kept(operation: Any, grade: Grade) -> bool:
    """Whether the results of an operation are kept."""
    name = str(operation)
    if name in _ATTENTION or name.startswith((f"galvatron.{SENT}", _OVER_RING)):
        return True
    return grade is Grade.PRODUCTS and (name in _PRODUCTS or name.startswith(_PROJECTIONS))


@cache
def _draws(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def keeping() -> bool:
    """Whether results are being kept or given back: whatever communicates must then be one operation."""
    return any(isinstance(mode, _Keeping | _GivingBack) for mode in _get_current_dispatch_mode_stack())


class Selective:
    """How one layer keeps results, from one forward to the next."""

    def __init__(self, grade: Grade) -> None:
        self.grade = grade
        self.learned: tuple[int, int] | None = None
        """Of the last forward whose backward came: how many results it had, and how many of these backward asked for.
        A layer's last product is not among them: only what follows it would ask for it. None: nobody knows yet."""

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around forward, and around forward when it runs again."""
        kept = _Results(self)
        return _Keeping(kept), _GivingBack(kept)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor, and how often it had been changed in place when it was made."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        # Else the copy would not know of later changes.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = tensor.detach()
        return cls(alias, alias._version)

    def given(self) -> Tensor:
        if self.tensor._version != self.version:
            raise InvalidInput(
                "a layer changes in place the result of a matrix product or of attention that +rs or +ra keeps; use "
                "+rc for this model"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Unread:
    """In the place of a partial sum that only a collective reads, whose own result is kept."""

    shape: torch.Size
    like: Tensor
    """Of no size."""

    def given(self) -> Tensor:
        return self.like.new_zeros(()).expand(self.shape)


@dataclass
class _Results:
    """Of one forward, in order."""

    selective: Selective
    made: list[tuple[Any, Any]] = field(default_factory=list)
    """Operations and their results; None: it is computed again."""
    states: list[Tensor] = field(default_factory=list)
    """Of the generator, before what draws from it again after a result that was drawn was kept."""


class _Keeping(TorchDispatchMode):
    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results, self._grade = results, results.selective.grade
        self._drawn = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._drawn and _draws(function):
            self._results.states.append(_generator(args, kwargs).get_state())
        made = function(*args, **(kwargs or {}))
        if is_kept(function, self._grade):
            self._keep(function, args, made)
            self._drawn = self._drawn or _draws(function)
        return made

    def __exit__(self, *error: Any) -> None:
        # Only where as much happened as when it was learned: a layer with experts may run other operations each time.
        made, learned = self._results.made, self._results.selective.learned
        if learned is not None and learned[0] == len(made):
            made[learned[1] :] = [(function, None) for function, _ in made[learned[1] :]]
        super().__exit__(*error)

    def _keep(self, function: Any, args: Sequence[Any], made: Any) -> None:
        results = self._results.made
        if str(function).startswith(f"galvatron.{SENT}"):
            for place, (before, kept) in enumerate(results):
                # All of it: of queries, keys and values that one product makes, others read what is not sent here.
                sent = isinstance(kept, _Kept) and kept.tensor.numel() == args[0].numel()
                if sent and _storage(kept.tensor) == _storage(args[0]):
                    results[place] = before, _Unread(kept.tensor.shape, kept.tensor.new_empty(0))
        results.append((function, tree_map(lambda own: _Kept.of(own) if isinstance(own, Tensor) else own, made)))


class _GivingBack(TorchDispatchMode):
    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results, self._grade = results, results.selective.grade
        self._place, self._drawn = 0, 0
        self._any_drawn = False
        self._unread: dict[int, Tensor] = {}
        """By storage; held, so that no other tensor gets the same."""

    def __exit__(self, *error: Any) -> None:
        selective, total = self._results.selective, len(self._results.made)
        before = selective.learned[1] if selective.learned is not None and selective.learned[0] == total else 0
        selective.learned = total, max(before, self._place)
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._any_drawn and _draws(function):
            _generator(args, kwargs).set_state(self._results.states[self._drawn])
            self._drawn += 1
        if not is_kept(function, self._grade):
            self._check_read(function, args, kwargs)
            return function(*args, **(kwargs or {}))
        self._any_drawn = self._any_drawn or _draws(function)
        place, self._place = self._place, self._place + 1
        if place >= len(self._results.made) or self._results.made[place][0] is not function:
            raise InvalidInput(
                f"a layer does not run the same operations when it is recomputed: {function} was not its result "
                f"{place}; use no recompute for this model"
            )
        kept, self._results.made[place] = self._results.made[place][1], (function, None)
        if kept is None:
            if str(function).startswith(f"galvatron.{SENT}"):  # other ranks would not take part
                raise RuntimeError(f"{function} would be sent again: backward never asked for its result before")
            self._check_read(function, args, kwargs)
            return function(*args, **(kwargs or {}))
        given = tree_map(
            lambda own: own.given() if isinstance(own, _Kept | _Unread) else own,
            kept,
            is_leaf=lambda own: isinstance(own, _Kept | _Unread),
        )
        if isinstance(kept, _Unread):
            self._unread[_storage(given)] = given
        return given

    def _check_read(self, function: Any, args: Any, kwargs: Any) -> None:
        """What stands for a partial sum has no numbers: nothing but views and the collective may see it."""
        if self._unread and not function.is_view and str(function) != "aten._unsafe_view.default":
            taken = (own for own in tree_flatten((args, kwargs))[0] if isinstance(own, Tensor))
            if any(_storage(own) in self._unread for own in taken):
                raise RuntimeError(f"{function} reads a partial sum that selective recompute did not keep")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _generator(args: Any, kwargs: Any) -> torch.Generator:
    """The default one of the device of an operation."""
    given = (own.device for own in tree_flatten((args, kwargs))[0] if isinstance(own, Tensor))
    device = torch.device((kwargs or {}).get("device") or next(given, "cpu"))
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def mark(graph: fx.Graph, grade: Grade) -> None:
    """Mark the nodes of a graph of forward and backward, so that the compiler keeps by the same rule. What draws random
    numbers is left to it."""
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") in _BACKWARD or _draws(node.target):
            continue
        source = node.args[0] if node.target is operator.getitem else node
        keep = isinstance(source, fx.Node) and is_kept(source.target, grade)
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = 1


_BACKWARD = frozenset({"is_backward", "must_be_in_backward"})
