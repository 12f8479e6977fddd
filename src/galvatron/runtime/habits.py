"""What people do with parameters and models by habit, of which a rank has only a part: made right, or refused by name.

``torch.nn.utils.clip_grad_norm_`` would clip by the norm of a rank's own part, and an optimizer that looks at whole
matrices would look at parts of them. Both are found where PyTorch comes by: its function for the norm of gradients, and
its hook before each step of any optimizer.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from galvatron.core.errors import InvalidInput
from galvatron.runtime.data_parallel.units import LocalParameter
from galvatron.runtime.optimizers import AdamWBF16

__all__ = ["SAVE", "Watched", "advice", "check_optimizer_kind", "hooks_of", "watch"]

_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """One rank's share of a model."""

    @property
    def locals(self) -> list[LocalParameter]:
        """Its part of each parameter."""

    def gradient_norm(self) -> Tensor:
        """Of the whole model's gradient."""


_ELEMENTWISE = frozenset(
    {
        *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
        *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        *(torch.optim.SGD, AdamWBF16),
    }
)
"""Optimizers that treat each number by itself, so that it does not matter how a matrix was cut."""
_BY_MATRIX = frozenset({"Adafactor", "Muon", "Lamb", "LAMB", "LARS", "Shampoo", "SOAP"})
"""Names of those that do not: they look at rows, columns, norms or products of whole tensors."""


def check_optimizer_kind(optimizer: Optimizer, parameters: Iterable[LocalParameter]) -> None:
    """Raise :class:`InvalidInput` if the optimizer looks at whole tensors, and a rank holds parts of some."""
    kind = type(optimizer)
    if kind in _ELEMENTWISE or not _several():
        return
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    local = next((each for each in parameters if id(each.master) in own and _divided(each)), None)
    if kind is torch.optim.LBFGS:
        raise InvalidInput("optimizer: LBFGS looks at the whole model at once, which no rank has; take AdamW, SGD …")
    if local is None:
        return
    if kind.__name__ in _BY_MATRIX:
        raise InvalidInput(
            f"optimizer: {kind.__name__} looks at whole tensors, but this rank has {list(local.master.shape)} of "
            f"{local.name}, which is {list(local.shard.shape)}; take one that works element by element (AdamW, SGD …), "
            "or plan with DP alone (--space dp)"
        )
    _LOG.warning(
        "optimizer: ranks hold parts of parameters, and it is not known of %s whether it works element by element",
        kind.__name__,
    )


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _divided(local: LocalParameter) -> bool:
    return tuple(local.master.shape) != tuple(local.shard.shape)


def hooks_of(tensor: Tensor) -> int:
    """How many hooks a parameter has."""
    return len(tensor._backward_hooks or ()) + len(tensor._post_accumulate_grad_hooks or ())


def watch(model: Watched) -> None:
    """Look after this model's parameters from now on."""
    cell = _norm()
    if not isinstance(cell.cell_contents, _Watcher):
        cell.cell_contents = _Watcher(cell.cell_contents)
    cell.cell_contents.models.add(model)


def _norm() -> CellType:
    """Where PyTorch's function for norms has what it does: so it is found by scripts that imported it before, too."""
    function: Any = clip_grad._get_total_norm
    cells: tuple[CellType, ...] = function.__closure__
    return next(cell for cell in cells if callable(cell.cell_contents))


class _Watcher:
    """Takes the place of what PyTorch computes norms of gradients with."""

    def __init__(self, otherwise: Callable[..., Tensor]) -> None:
        self.models: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._otherwise = otherwise
        register_optimizer_step_pre_hook(self._before_step)

    def __call__(
        self, tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *options: Any, **named: Any
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = self._owner(given)
        if model is None or not _several():
            return self._otherwise(given, norm_type, *options, **named)
        if float(norm_type) != 2.0 or len(given) != len(_gradients(model)):
            raise InvalidInput(
                f"clip_grad_norm_: given {len(given)} gradients of this rank's {len(_gradients(model))} and the norm "
                f"{norm_type}; expected all of model.parameters() and the 2-norm, which ranks put together; or call "
                "model.clip_gradients(limit)"
            )
        norm = model.gradient_norm()
        if (options[0] if options else named.get("error_if_nonfinite", False)) and not norm.isfinite():
            raise RuntimeError(f"The total norm of the gradients is {float(norm)}, so they cannot be clipped")
        return norm.to(given[0].dtype) if given else norm

    def _owner(self, gradients: Sequence[Tensor]) -> Watched | None:
        """The model whose gradients these are. A rank of which nothing trains has none, and must take part all the
        same."""
        if not gradients:
            if len(self.models) > 1:
                gc.collect()  # of models that were there before
            if len(self.models) > 1 and _several():
                raise InvalidInput(
                    "clip_grad_norm_: given no gradient of this rank (its stage is frozen), so that it cannot be told "
                    "which of several models they are of; call model.clip_gradients(limit)"
                )
            return next((own for own in self.models if not _gradients(own)), None)
        numbers = {id(own) for own in gradients}
        return next((own for own in self.models if numbers & _gradients(own)), None)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if type(optimizer) in _ELEMENTWISE or optimizer in self._seen:
            return
        for model in self.models:
            check_optimizer_kind(optimizer, model.locals)
        self._seen.add(optimizer)


def _gradients(model: Watched) -> set[int]:
    return {id(own.master.grad) for own in model.locals if own.master.grad is not None}


# Names of torch.nn.Module that people try

SAVE = (
    "ranks hold parts of it: galvatron.Checkpoints saves and loads it, dict(model.whole_parameters()), called on every "
    "rank, has it whole, and `galvatron export` writes Hugging Face's format"
)
_PLACE = "device and type are settled by parallelize(…, device=…, dtype=…)"
_INSIDE = "its layers are split over ranks; change or look at the model before parallelize"
_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("state_dict", "load_state_dict", "save_pretrained", "push_to_hub", "module", "generate"), SAVE),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"), _PLACE),
    **dict.fromkeys(
        ("modules", "named_modules", "children", "named_children", "apply", "get_submodule", "register_forward_hook"),
        _INSIDE,
    ),
    "forward": "forward_backward(batch) runs forward and backward, evaluate(batch) forward alone",
    "requires_grad_": "what is frozen is settled by parallelize; freeze the model that you give to it",
    "no_sync": "gradients add up over calls of forward_backward until optimizer.zero_grad(); leave it out",
    "compile": "the plan says whether layers are compiled (galvatron.plan(…, compile=True))",
    "gradient_checkpointing_enable": "the plan says which layers are recomputed (+rc)",
    "config": "model.plan.model.config has the configuration",
}


def advice(name: str) -> str:
    """What to use in the place of an attribute that a rank's share of a model does not have."""
    said = _ADVICE.get(name)
    return f"'ParallelModel' object has no attribute {name!r}" + ("" if said is None else f": {said}")
