"""Optimizers: what each keeps and moves, which the planner prices, and which of PyTorch's classes it is.

One entry of :data:`OPTIMIZERS` is all that an optimizer needs. Only those that work elementwise can stand here: a rank
has parts of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.errors import InvalidInput

__all__ = ["ADAMW", "ADAMW_BF16", "GRADIENT_BYTES", "OPTIMIZERS", "SGD", "OptimizerSpec", "optimizer_named"]

_MASTER_BYTES = 4
GRADIENT_BYTES = 4
"""Masters are fp32 and gradients are reduced in fp32, whatever the working precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Facts of one optimizer. Bytes are those of one parameter."""

    name: str
    """As plan files and the command line have it."""
    state_bytes: int
    """What it keeps besides the fp32 master and gradient."""
    traffic_bytes: int
    """What one step reads and writes: master, gradient and states."""
    torch_classes: tuple[str, ...]
    """The class that trains, of ``torch.optim`` or of ours, then those that keep and move the same."""
    fused: bool
    """Whether PyTorch has fused kernels for these on CPUs and GPUs."""
    settings: tuple[str, ...]
    """Settings of a training run that its class takes besides learning rate and weight decay."""

    @property
    def bytes_per_parameter(self) -> int:
        """Master, gradient and states."""
        return _MASTER_BYTES + GRADIENT_BYTES + self.state_bytes


ADAMW = OptimizerSpec(
    name="adamw",
    state_bytes=8,  # two moments
    traffic_bytes=28,  # reads parameter, gradient and two moments, writes parameter and moments
    torch_classes=("AdamW", "Adam"),
    fused=True,
    settings=("betas",),
)
"""The default: what is trained and priced unless something else is asked for."""

SGD = OptimizerSpec(
    name="sgd",
    state_bytes=4,  # momentum
    traffic_bytes=20,  # reads parameter, gradient and momentum, writes parameter and momentum
    torch_classes=("SGD",),
    fused=True,
    settings=("momentum",),
)

ADAMW_BF16 = OptimizerSpec(
    name="adamw-bf16",
    state_bytes=4,  # two moments in bf16
    traffic_bytes=20,  # as AdamW, the moments at half their size
    torch_classes=("AdamWBF16",),
    fused=True,
    settings=("betas",),
)
"""AdamW with moments in bf16, beside masters and gradients in fp32."""

OPTIMIZERS = (ADAMW, ADAMW_BF16, SGD)


def optimizer_named(name: str, *, where: str = "optimizer") -> OptimizerSpec:
    """``where``: the field or option that the name stands in."""
    for optimizer in OPTIMIZERS:
        if optimizer.name == name:
            return optimizer
    known = ", ".join(optimizer.name for optimizer in OPTIMIZERS)
    raise InvalidInput(f"{where}: {name!r} is unknown; choose one of {known}")
