"""A unit: the parameters of one layer on this rank, as the optimizer sees them, and when their gradients are summed.

There are two: ``ReplicatedUnit`` (``replicated``) keeps parameters whole (DP, TP alone, one device), ``ShardedUnit``
(``sharded``) divides them (SDP, ZeRO-2, hybrid) through FSDP2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.runtime import collectives
from galvatron.runtime.data_parallel.shards import ParameterShard

__all__ = ["LocalParameter", "Unit"]


@dataclass(eq=False)
class LocalParameter:
    """What a rank holds of one parameter."""

    name: str
    """In the stock model."""
    shard: ParameterShard
    master: nn.Parameter
    """What the optimizer updates: a plain tensor, in fp32 (or what training computes in, if that is wider)."""
    replicas: int
    """How many ranks of the stage hold the same piece."""
    holders: tuple[int, ...]
    """Which these are, in order."""
    primary: bool = True
    """Whether this rank speaks for all of them when the whole is put together."""
    counted: bool = True
    """False for a second copy of a tied weight in another stage: the norm counts it once."""
    summed_over: ProcessGroup | None = None
    """Ranks over which the gradient is still a partial sum after the unit's own reduction (sequence parallelism)."""

    def __post_init__(self) -> None:
        self.trained: bool = self.master.requires_grad
        """False: frozen. It has no gradient and no optimizer state, nothing of it is synchronised, and it is held in
        the type that layers compute in. What is frozen is settled when the unit is made."""
        self.came = False
        """Whether it had a part in the loss on this rank, in this iteration."""


class Unit(ABC):
    """The parameters of one layer. Where a gradient has come it says so (``LocalParameter.came``)."""

    locals: list[LocalParameter]

    @abstractmethod
    def refresh(self) -> None:
        """Before any forward: masters may have changed."""

    @abstractmethod
    def begin(self) -> None:
        """Before the first micro-batch of an iteration: gradients may have been dropped."""

    @abstractmethod
    def expect_backward(self, *, last: bool) -> None:
        """Before a micro-batch's backward; after the ``last`` one, gradients are summed over all replicas."""

    @abstractmethod
    def passed(self) -> None:
        """A micro-batch's backward has gone through the layer. A parameter without a gradient had no part in it (an
        expert that none of this rank's rows chose); on other ranks it may have, and all must sum in one order."""

    @abstractmethod
    def finish(self) -> None:
        """After the last backward: wait for the sums, so that each master has its gradient."""

    @abstractmethod
    def end_evaluation(self) -> None:
        """After a forward without backward: let go of what only backward would have freed."""

    def sum_partial(self) -> None:
        """Sum gradients that sequence parallelism left partial: one message for all of them."""
        partial = [local for local in self.locals if local.summed_over is not None and local.master.grad is not None]
        if not partial:
            return
        group = partial[0].summed_over
        gradients: list[Tensor] = [local.master.grad for local in partial if local.master.grad is not None]
        assert group is not None
        total = collectives.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), group)
        pieces = total.split([gradient.numel() for gradient in gradients])
        for gradient, shard in zip(gradients, pieces, strict=True):
            gradient.copy_(shard.view_as(gradient))
