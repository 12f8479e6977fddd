"""An optimizer without its tensors: its class, its groups with their hyper-parameters, and room for its states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from galvatron.core.errors import InvalidInput
from galvatron.runtime.data_parallel.units import LocalParameter
from galvatron.runtime.model import ParallelModel
from galvatron.train.checkpoints.manifest import Manifest, SavedOptimizer

__all__ = ["check_optimizer", "describe_optimizer", "prepare_optimizer", "same_groups"]

_LOG = logging.getLogger(__name__)
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Of a group: its tensors, and how the step is computed, which is this run's own affair."""


def describe_optimizer(model: ParallelModel, optimizer: Optimizer) -> SavedOptimizer:
    """What this rank knows of it: groups of its own parameters."""
    return SavedOptimizer(
        kind=type(optimizer).__name__,
        groups=tuple(
            {name: _plain(value, name) for name, value in group.items() if name not in _HOW}
            for group in optimizer.param_groups
        ),
        group_of=_groups(model, optimizer),
    )


def _groups(model: ParallelModel, optimizer: Optimizer) -> dict[str, int]:
    numbers = {
        parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    return {local.name: numbers[local.master] for local in model.locals if local.master in numbers}


def _plain(value: Any, name: str) -> Any:
    """A hyper-parameter as JSON has it."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part, name) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput(
        f"optimizer: its hyper-parameter {name!r} is a {type(value).__name__}; expected numbers, texts or lists of them"
    )


def check_optimizer(model: ParallelModel, optimizer: Optimizer, saved: SavedOptimizer) -> None:
    """Whether the saved state means the same to this optimizer."""
    kind = type(optimizer).__name__
    if kind != saved.kind:
        raise InvalidInput(
            f"optimizer: {kind} given; the checkpoint has the state of {saved.kind}; go on with that, or load the "
            "weights alone (optimizer=None)"
        )
    given = _groups(model, optimizer)
    for name in (local.name for local in model.locals):
        if (name in given) != (name in saved.group_of):
            has, had = ("is", "was not") if name in given else ("is not", "was")
            raise InvalidInput(
                f"optimizer: {name} {has} among its parameters; when the checkpoint was saved, it {had}; give it the "
                "same parameters, or load the weights alone (optimizer=None)"
            )


def same_groups(model: ParallelModel, optimizer: Optimizer, saved: SavedOptimizer) -> bool:
    """Whether this rank's parameters are grouped as they were saved."""
    given = _groups(model, optimizer)
    alike = all(saved.group_of.get(name) == number for name, number in given.items())
    return alike and len(optimizer.param_groups) == len(saved.groups)


def prepare_optimizer(model: ParallelModel, optimizer: Optimizer, manifest: Manifest, *, regroup: bool) -> None:
    """Set its hyper-parameters, and make room for the saved states of this rank's parameters. Where parameters are in
    other groups than they were (``regroup``), states are still their own, and hyper-parameters stay as given."""
    if not regroup:
        for group, saved in zip(optimizer.param_groups, manifest.optimizer.groups, strict=True):
            for name, value in saved.items():
                group[name] = _as_before(group.get(name), value)
    elif model.rank == 0:
        _LOG.warning(
            "optimizer: its parameters are in other groups than in the checkpoint, so learning rates and the like stay "
            "as they are given here; states are loaded by the names of parameters"
        )
    entries: dict[str, dict[str, torch.dtype]] = {}
    for key, tensor in manifest.tensors.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            entries.setdefault(name, {})[entry] = getattr(torch, tensor.dtype)
    rooms = _Rooms(manifest)
    groups = _groups(model, optimizer)
    for local in model.locals:
        optimizer.state.pop(local.master, None)
        if local.name in entries:
            group = optimizer.param_groups[groups[local.name]]
            optimizer.state[local.master] = rooms.make(local, entries[local.name], group)


@dataclass(frozen=True, slots=True)
class _Rooms:
    """Empty state tensors where the optimizer expects them."""

    manifest: Manifest

    def make(
        self, local: LocalParameter, entries: Mapping[str, torch.dtype], group: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        master = local.master.detach()
        # As torch's own ``load_state_dict``: a fused step counts on the device, others on the CPU.
        counting = master.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        made = {}
        for entry, dtype in entries.items():
            shape = self.manifest.tensors[f"optimizer/{local.name}/{entry}"].shape
            if shape == local.shard.shape:
                made[entry] = torch.empty_like(master, dtype=dtype)
            else:
                made[entry] = torch.empty(shape, dtype=dtype, device=counting)
        return made


def _as_before(present: Any, value: Any) -> Any:
    """A saved hyper-parameter in the type that the optimizer has it in."""
    if isinstance(present, Tensor):
        return present.fill_(value)
    return tuple(value) if isinstance(present, tuple) else value
