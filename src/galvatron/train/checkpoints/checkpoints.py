"""Saving and loading the state of training: :class:`Checkpoints`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from galvatron.core.errors import CheckpointCorrupt, GalvatronError, InvalidInput, RankFailure, SaveFailed
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.randomness import RandomState
from galvatron.train.checkpoints.folder import Saved, complete, discard
from galvatron.train.checkpoints.layout import Part, buffer_parts, staged, targets
from galvatron.train.checkpoints.manifest import FORMAT_VERSION, MANIFEST, Manifest
from galvatron.train.checkpoints.optimizer import check_optimizer, describe_optimizer, prepare_optimizer, same_groups
from galvatron.train.checkpoints.storage import PartsToRead, PartsToWrite, Reader, Writer
from galvatron.train.checkpoints.together import from_first, together

__all__ = ["Checkpoints", "Loaded"]

_logger = logging.getLogger(__name__)
_SHOWN = 5
"""Names listed in an error before "and … more"."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where training goes on."""

    step: int
    progress: Mapping[str, Any]
    """What was given to :meth:`Checkpoints.save`, as JSON gives it back (lists for tuples, texts for keys)."""


class Checkpoints:
    """The checkpoints of a run in one folder, which all machines of the job must see.

    All ranks call the same methods in the same order. ``save`` copies this rank's share to CPU memory and returns; a
    thread with a process group of its own writes it. One save is under way at a time. What goes wrong in the background
    is logged at once, and raised on every rank by the next ``save``, ``load`` or ``finish``.
    """

    def __init__(self, folder: str | PathLike[str], keep: int = 3) -> None:
        """``keep``: how many steps stay; older ones are deleted when a new one is complete."""
        if not isinstance(folder, str | PathLike) or not str(folder):
            raise InvalidInput(f"folder: {folder!r} given; expected the one of the checkpoints, such as 'checkpoints'")
        if not isinstance(keep, int) or keep < 1:
            raise InvalidInput(f"keep: {keep!r} given; expected at least 1, the checkpoint just saved")
        self._folder, self._keep = Path(folder), keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._group: ProcessGroup | None = None
        self._saving: Future[None] | None = None

    # What is there

    def all(self) -> list[Saved]:
        """The complete checkpoints, oldest step first. Looks at names alone."""
        return complete(self._folder)

    def latest(self) -> Saved | None:
        """The newest complete one."""
        return next(reversed(self.all()), None)

    # Saving

    def save(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        progress: Mapping[str, Any],
        *,
        step: int,
        wait: bool = False,
    ) -> None:
        """Save the state of training after ``step`` steps; ``wait``: return when it is complete.

        ``progress``: anything that JSON can hold and that is the same on every rank (the data's position, the epoch).
        """
        self.finish()
        if step < 0:
            raise InvalidInput(f"step: {step} given; expected 0 or more")
        random = model.random_state
        manifest = Manifest(
            version=FORMAT_VERSION,
            step=step,
            world=dist.get_world_size(),
            plan=model.plan.to_dict(),
            seed=random.seed,
            iteration=random.iteration,
            progress=_json(progress),
            optimizer=describe_optimizer(model, optimizer),
            files={},
            tensors={},
        )
        parts = staged(model, optimizer)
        writer = Writer(self._folder, manifest, [*model.shapes, *model.buffers.names], model.rank, self._keep)
        self._saving = self._thread.submit(self._write, parts, writer, step, self._channel())
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way, if one is; raises :class:`galvatron.SaveFailed` if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, parts: dict[str, Part], writer: Writer, step: int, group: ProcessGroup) -> None:
        """In the thread."""
        try:
            dcp_save(parts, storage_writer=writer, planner=PartsToWrite(), process_group=group)
        except (CheckpointException, Exception) as error:  # the former is no Exception
            failed = SaveFailed(f"step {step} was not saved: {_cause(error)}; earlier checkpoints are as they were")
            _logger.error("%s", failed)
            if dist.get_rank(group) == 0:
                discard(writer.partial)
            raise failed from error

    # Loading

    def load(self, model: ParallelModel, optimizer: Optimizer | None, step: int | None = None) -> Loaded:
        """Set model and optimizer to the newest checkpoint, or to that of a step, whatever plan it was saved under.

        Without an optimizer only the weights are loaded, as for fine-tuning; random numbers start anew then. Every
        block that is read is checked: if one is damaged, all ranks raise :class:`galvatron.CheckpointCorrupt`, which
        names the file and the step to load instead; model and optimizer are undefined until another load succeeds.
        """
        self.finish()
        group = self._channel()
        saved, text = from_first(group, lambda: self._chosen(step))
        try:
            manifest = Manifest.parse(text, saved.path / MANIFEST)
            together(group, lambda: self._check(manifest, saved, model, optimizer))
            if optimizer is not None:
                same = torch.tensor(same_groups(model, optimizer, manifest.optimizer))
                dist.all_reduce(same, dist.ReduceOp.BAND, group=group)  # for all ranks alike
                prepare_optimizer(model, optimizer, manifest, regroup=not same)
            buffers = _empty_buffers(model, manifest)
            parts = targets(model, optimizer) | buffer_parts(buffers)
            together(group, lambda: _check_tensors(parts, manifest))
            dcp_load(parts, storage_reader=Reader(saved.path, manifest), planner=PartsToRead(), process_group=group)
        except CheckpointException as error:
            raise self._with_remedy(_first_failure(error), saved) from error
        except CheckpointCorrupt as error:
            raise self._with_remedy(error, saved) from error
        model.buffers.set(buffers)
        if optimizer is not None:
            model.random_state = RandomState(manifest.seed, manifest.iteration)
        return Loaded(manifest.step, manifest.progress)

    def _chosen(self, step: int | None) -> tuple[Saved, str]:
        found = self.all()
        steps = ", ".join(str(saved.step) for saved in found) or "none"
        chosen = [saved for saved in found if step is None or saved.step == step]
        if not chosen:
            wanted = "a checkpoint" if step is None else f"step {step}"
            raise InvalidInput(f"{self._folder}: {wanted} to load is not there; complete steps: {steps}")
        try:
            return chosen[-1], Manifest.read(chosen[-1].path).text()
        except CheckpointCorrupt as error:
            raise self._with_remedy(error, chosen[-1]) from error

    def _with_remedy(self, error: BaseException, saved: Saved) -> BaseException:
        """A damaged checkpoint with what to load in its place."""
        if not isinstance(error, CheckpointCorrupt):
            return error
        earlier = [other.step for other in self.all() if other.step < saved.step]
        remedy = f"load step {earlier[-1]} (step={earlier[-1]})" if earlier else "no earlier step is complete"
        return CheckpointCorrupt(f"{error}; {remedy}")

    def _check(self, manifest: Manifest, saved: Saved, model: ParallelModel, optimizer: Optimizer | None) -> None:
        if manifest.step != saved.step:
            raise CheckpointCorrupt(f"{saved.path}: holds step {manifest.step}; was the folder renamed?")
        given, held = model.shapes, {name: own.shape for name, own in manifest.parameters.items()}
        different = [
            f"{name}: {_shape(given.get(name))} in the model, {_shape(held.get(name))} in the checkpoint"
            for name in {**given, **held}
            if given.get(name) != held.get(name)
        ]
        if different:
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise InvalidInput(
                f"{saved.path}: is of another model ({manifest.plan['model']['name']}); {'; '.join(different[:_SHOWN])}"
                f"{more}; build the model it was saved from"
            )
        if optimizer is not None:
            check_optimizer(model, optimizer, manifest.optimizer)

    def _channel(self) -> ProcessGroup:
        """The group that checkpoints speak over, apart from all of training's; gloo, because they speak from CPUs."""
        if self._group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, ProcessGroup)
            self._group = group
        return self._group


def _empty_buffers(model: ParallelModel, manifest: Manifest) -> dict[str, Tensor]:
    """For those that the checkpoint has. It has none if an older program wrote it: the model then keeps its own."""
    saved = manifest.buffers
    return {name: torch.empty_like(own) for name, own in model.buffers.values().items() if name in saved}


def _json(progress: Mapping[str, Any]) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(json.dumps(dict(progress), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"progress: cannot be written as JSON ({error}); give numbers, texts and lists") from None
    return read


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _check_tensors(parts: Mapping[str, Part], manifest: Manifest) -> None:
    """Nothing is cast on the way: DCP would do it without a word."""
    for key, part in parts.items():
        saved = manifest.tensors[key]
        if getattr(torch, saved.dtype, None) is not part.dtype or saved.shape != part.shape:
            raise InvalidInput(
                f"{key}: the checkpoint has {saved.dtype} {list(saved.shape)}; expected {part.dtype} "
                f"{list(part.shape)}; train in the precision it was saved in"
            )


def _first_failure(error: CheckpointException) -> BaseException:
    """DCP's collected failures: what the first rank raised."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return cause if isinstance(cause, GalvatronError) else RankFailure(f"rank {rank} failed: {cause!r}")


def _cause(error: BaseException) -> str:
    """Why a save failed, for people."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if isinstance(cause, OSError):
        return f"rank {rank} cannot write {cause.filename or 'its file'}: {cause.strerror or cause}"
    return f"rank {rank}: {cause}"
