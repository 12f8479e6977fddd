"""Sharded data parallelism (SDP, ZeRO-2, and DP over SDP) of one layer through PyTorch's FSDP2.

SDP gathers a layer's parameters before its forward and again before its backward, and in every micro-batch reduces its
gradient and keeps just the shard. ZeRO-2 keeps the gathered parameters until the iteration ends. With DP outside SDP,
shards are summed over the DP axis once, after the last micro-batch. The optimizer gets the local shards as plain
tensors, so that any fused optimizer takes all of a model's parameters in one group.

All that is used of FSDP2 is in this module, and in ``fsdp_memory`` what it takes for its messages.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from galvatron.core.errors import InvalidInput
from galvatron.runtime.data_parallel.fsdp_memory import FsdpAllGather, FsdpReduceScatter
from galvatron.runtime.data_parallel.units import LocalParameter, Unit
from galvatron.runtime.settings import ComputeSettings

# FSDP2 of torch 2.13 calls collectives by names that torch 2.13 warns about.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)`", FutureWarning
)

__all__ = ["ShardGroups", "ShardedUnit", "prefetch", "shard", "shard_root"]


@dataclass(frozen=True, kw_only=True)
class ShardGroups:
    """Over which ranks a layer is sharded, and replicated outside of that."""

    shard: ProcessGroup
    replicate: ProcessGroup | None = None
    ranks: tuple[tuple[int, ...], ...] = ()
    """With ``replicate``: the ranks of each replica."""

    def mesh(self, device_type: str) -> DeviceMesh:
        if self.replicate is None:
            return DeviceMesh.from_group(self.shard, device_type, mesh_dim_names=("sdp",))
        grid = torch.tensor(self.ranks)
        groups = [self.replicate, self.shard]
        return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=("dp", "sdp"))


def shard(
    module: nn.Module,
    groups: ShardGroups,
    settings: ComputeSettings,
    *,
    reshard: bool,
    others: Collection[nn.Parameter] = (),
) -> None:
    """Divide a layer's parameters but the ``others``; gradients are reduced in the type of the masters."""
    narrow = settings.dtype != settings.master_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=settings.dtype if narrow else None, reduce_dtype=settings.master_dtype, cast_forward_inputs=False
    )
    fully_shard(
        module,
        mesh=groups.mesh(settings.device.type),
        reshard_after_forward=reshard,
        mp_policy=policy,
        ignored_params=set(others),
    )
    assert isinstance(module, FSDPModule)
    # The loss is divided by the number of targets of the whole batch, so gradients are sums everywhere.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def shard_root(stage: nn.Module, units: Sequence[ShardedUnit], device_type: str) -> None:
    """Let the sharded layers of a stage share streams and prefetch each other; the stage itself owns nothing."""
    managed = {parameter for unit in units for parameter in unit._sharded}
    ignored = {parameter for parameter in stage.parameters() if parameter not in managed}
    fully_shard(stage, mesh=units[0].groups.mesh(device_type), reshard_after_forward=False, ignored_params=ignored)


def prefetch(layers: Sequence[Sequence[ShardedUnit]]) -> None:
    """Gather each layer's parameters while the one before it computes; ``layers``: the sharded units of each.

    The first unit of a layer gathers ahead: the others of the layer, which are inside it, then the first of the next
    one. Those inside a layer gather nothing ahead in forward, because a recomputed forward would gather for layers
    whose backward is over. Layers that have no backward, because nothing in them nor before them trains, are not
    gathered for one.
    """
    for first, *inner in layers:
        for unit in (first, *inner):
            if unit.inside:
                unit.fsdp.set_modules_to_backward_prefetch([unit.fsdp])  # itself: without this, FSDP2 would choose
        if inner:
            first.gathers_next(inner)
            first.fsdp.set_modules_to_backward_prefetch([unit.fsdp for unit in inner])
    for (first, *inner), (second, *after) in pairwise(layers):
        if not first.inside:
            first.gathers_next([*inner, second])
        # Itself, where nothing is left to gather: without this, FSDP2 would choose.
        before = [unit.fsdp for unit in after] + ([first.fsdp] if first.has_backward else [])
        second.fsdp.set_modules_to_backward_prefetch(before or [second.fsdp])


class ShardedUnit(Unit):
    """One layer's parameters, divided over its SDP (or ZeRO-2) group."""

    def __init__(
        self,
        module: nn.Module,
        groups: ShardGroups,
        pairs: list[tuple[LocalParameter, nn.Parameter]],
        *,
        zero2: bool,
        inside: bool = False,
    ) -> None:
        """``pairs``: each with FSDP2's sharded parameter, whose local part the master shares its memory with;
        ``inside``: the module is a part of a layer, whose forward runs again in backward where it is recomputed."""
        self.module, self.groups, self.zero2, self.inside = module, groups, zero2, inside
        self.has_backward = True
        """Whether gradients reach the layer; False where nothing in it nor before it trains."""
        self.locals = [local for local, _ in pairs]
        self._sharded = [parameter for _, parameter in pairs]
        held = {id(parameter): local for local, parameter in pairs}
        self._by_name = {name: held[id(own)] for name, own in module.named_parameters() if id(own) in held}
        self._filled, self._seen = set[str](), set[str]()
        """Parameters that got a gradient of zeros in some micro-batch, and those that had one of their own."""
        device = self._sharded[0].device
        self._gathering = FsdpAllGather(device, self._is_whole) if device.type == "cuda" else None
        self._reduction = FsdpReduceScatter(device) if device.type == "cuda" else None
        # What they have to be has no public name.
        if self._gathering is not None:
            self.fsdp.set_custom_all_gather(cast(Any, self._gathering))
        if self._reduction is not None:
            self.fsdp.set_custom_reduce_scatter(cast(Any, self._reduction))

    @property
    def fsdp(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    @property
    def _group(self) -> Any:
        group = self.fsdp._get_fsdp_state()._fsdp_param_group
        assert group is not None
        return group

    def _is_whole(self) -> bool:
        return bool(self._group.is_unsharded)

    def gathers_next(self, units: Sequence[ShardedUnit]) -> None:
        """Gather these ahead in forward."""
        self.fsdp.set_modules_to_forward_prefetch([unit.fsdp for unit in units])
        if self._gathering is not None:
            self._gathering.following = [unit._gathering for unit in units if unit._gathering is not None]

    def gather(self) -> None:
        """Have the whole parameters at hand, for a layer that uses one of them."""
        self.fsdp.unshard()

    @torch.no_grad()
    def refresh(self) -> None:
        """FSDP2 gathers from the masters' memory. Where one was given other memory since (``parameter.data = …``, as
        averaged weights often are), it gathers from there: who gave it may still have use for what was there before."""
        if self._gathering is not None:
            self._gathering.expect()
        moved = [
            (local, parameter)
            for local, parameter in zip(self.locals, self._sharded, strict=True)
            if local.master.data_ptr() != local_part(parameter).data_ptr()
        ]
        if not moved:
            return
        self.fsdp.reshard()
        for local, parameter in moved:
            before = local_part(parameter)
            if local.master.shape != before.shape:
                raise InvalidInput(
                    f"{local.name}: was given data of shape {list(local.master.shape)}; this rank's part of it has "
                    f"{list(before.shape)}"
                )
            cast(Any, parameter)._local_tensor = local.master.data.to(before).contiguous()
        for own in self._group.fsdp_params:
            own.reset_sharded_param()
        for local, parameter in moved:
            local.master.data = local_part(parameter)

    def begin(self) -> None:
        self._filled.clear()
        self._seen.clear()
        for local, parameter in zip(self.locals, self._sharded, strict=True):
            if local.master.grad is None:
                parameter.grad = None

    def end_evaluation(self) -> None:
        if self._gathering is not None:
            self._gathering.forget()
        self.fsdp.reshard()

    def expect_backward(self, *, last: bool) -> None:
        if self.zero2:
            self.fsdp.set_reshard_after_backward(last)
        if self.groups.replicate is not None:
            self.fsdp.set_requires_all_reduce(last)
        if self._gathering is not None:
            self._gathering.forget()
        if self._reduction is not None:
            first = all(parameter.grad is None for parameter in self._sharded)
            self._reduction.expect(stays=first if self.groups.replicate is None else last)

    def passed(self) -> None:
        # FSDP2 sends what has a gradient; the message must be the same on all ranks.
        for name, whole in self.module.named_parameters():
            if not whole.requires_grad or isinstance(whole, DTensor):  # sharded by a unit inside, whose message is gone
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
                self._filled.add(name)
            else:
                self._seen.add(name)

    def finish(self) -> None:
        for local, parameter in zip(self.locals, self._sharded, strict=True):
            local.master.grad = None if parameter.grad is None else local_part(parameter.grad)
            local.came = parameter.grad is not None
        for name in self._filled - self._seen:
            if name in self._by_name:
                self._by_name[name].came = False


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    part: Tensor = tensor._local_tensor
    return part
