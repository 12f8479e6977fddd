"""Classes of the optimizers that plans name (:mod:`galvatron.core.spec.optimizer`): PyTorch's, and one of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import OPTIMIZERS, OptimizerSpec

__all__ = ["AdamWBF16", "has_fused", "skipped_unless_finite", "skips_itself", "torch_class"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBF16(torch.optim.AdamW):
    """AdamW that keeps its moments in bf16. It computes in the parameters' type and rounds moments to the nearest.

    PyTorch's fused kernel for GPUs takes such moments as they are. Elsewhere a parameter's moments are widened for its
    step, one parameter after the other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        for name in ("amsgrad", "capturable", "differentiable"):
            if options.get(name):
                raise InvalidInput(f"adamw-bf16: {name} given, which AdamW with moments in bf16 does not have; drop it")
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            own = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in own:
                self._hold(parameter, group)
            if not group["fused"] or not all(_takes_bf16(parameter.device) for parameter in own):
                for parameter in own:
                    self._step_of(parameter, group)
                continue
            self._fused_step(own, group)
        return loss

    def _hold(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Have its moments in bf16: from the first step on, and where PyTorch widened loaded ones."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else None)
            state.update({name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in _MOMENTS})
        for name in _MOMENTS:
            state[name] = state[name].to(torch.bfloat16)

    def _step_of(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        wide = [state[name].to(parameter.dtype) for name in _MOMENTS]
        self._run([parameter], [[moment] for moment in wide], group)
        for name, moment in zip(_MOMENTS, wide, strict=True):
            state[name].copy_(moment)

    def _fused_step(self, own: list[Tensor], group: dict[str, Any]) -> None:
        self._run(own, [[self.state[parameter][name] for parameter in own] for name in _MOMENTS], group)

    def _run(self, own: list[Tensor], moments: list[list[Tensor]], group: dict[str, Any]) -> None:
        adamw(
            own,
            [parameter.grad for parameter in own if parameter.grad is not None],
            moments[0],
            moments[1],
            [],
            [self.state[parameter]["step"] for parameter in own],
            foreach=False,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            found_inf=getattr(self, "found_inf", None),
        )


@cache
def _takes_bf16(device: torch.device) -> bool:
    """Whether PyTorch's fused kernel takes moments in bf16 beside parameters in fp32 there."""
    if device.type == "cpu":
        return False
    one, moments = (
        torch.zeros(1, device=device),
        [torch.zeros(1, dtype=torch.bfloat16, device=device) for _ in _MOMENTS],
    )
    count = torch.ones((), device=device)
    try:
        torch._fused_adamw_(
            [one], [one.clone()], [moments[0]], [moments[1]], [], [count], lr=0.0, beta1=0.9, beta2=0.9,
            weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
        )  # fmt: skip
    except RuntimeError:
        return False
    return True


_OURS = {"AdamWBF16": AdamWBF16}


def torch_class(spec: OptimizerSpec) -> Callable[..., Optimizer]:
    """The one that trains."""
    kind: Callable[..., Optimizer] = _class(spec.torch_classes[0])
    return kind


def skips_itself(optimizer: Optimizer) -> bool:
    """Whether a step of it can be skipped on the device: PyTorch's fused kernels can, for its gradient scalers."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def skipped_unless_finite(optimizer: Optimizer, *figures: Tensor) -> Iterator[None]:
    """A step meanwhile changes neither weights nor moments if one of these numbers is not finite; nobody waits."""
    finite = torch.stack([figure.double() for figure in figures]).isfinite().all()
    given = cast(Any, optimizer)
    given.grad_scale, given.found_inf = None, finite.logical_not().float()
    try:
        yield
    finally:
        del given.grad_scale, given.found_inf


def has_fused(kind: Callable[..., Optimizer]) -> bool:
    """Whether PyTorch has fused kernels for this class on every device."""
    return any(kind is _class(name) for spec in OPTIMIZERS if spec.fused for name in spec.torch_classes)


def _class(name: str) -> Any:
    return _OURS.get(name) or getattr(torch.optim, name)
