"""A model that runs a plan: what :func:`galvatron.parallelize` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Strategy, optimizer_named
from galvatron.families.layer import Batch
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.batches import LocalBatch, Reader
from galvatron.runtime.buffers import Buffers
from galvatron.runtime.data_parallel.units import LocalParameter, Unit
from galvatron.runtime.habits import SAVE, advice, check_optimizer_kind, hooks_of, watch
from galvatron.runtime.optimizers import has_fused, torch_class
from galvatron.runtime.pending_loss import PendingLoss
from galvatron.runtime.pipeline.run import PassTimer, Pipeline
from galvatron.runtime.products import products
from galvatron.runtime.randomness import RandomState, restored
from galvatron.runtime.replicas import compare_replicas
from galvatron.runtime.same_batches import Marks, compare_batches, compared_here
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.tied.across_stages import TieExchange
from galvatron.runtime.whole import clip_, gradient_norm, whole

__all__ = ["ParallelModel", "PendingLoss"]


def _as_it_is(batch: Any) -> Batch:
    if not isinstance(batch, Mapping):
        raise InvalidInput(
            f"batch: a {type(batch).__name__} given; expected a dictionary of tensors, or give parallelize one of your "
            "batches as example="
        )
    return batch


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """What one rank's share is made of."""

    pipeline: Pipeline
    units: tuple[Unit, ...]
    reader: Reader
    exchanges: tuple[tuple[LocalParameter, TieExchange], ...]
    """For each weight tied across stages of which this rank holds rows."""
    loss_replicas: int
    """Ranks of the last stage that compute the loss of the same rows."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all parameters of the model, by their stock names."""
    buffers: Buffers


class ParallelModel:
    """One rank's share of a model under a plan.

    ``parameters()`` are plain tensors, the parts of the parameters this rank owns, so that an ordinary optimizer takes
    them; it should work elementwise (Adam, SGD …), because a part says nothing about the matrix it was cut from.
    """

    def __init__(self, plan: Plan, parts: RankParts, settings: ComputeSettings) -> None:
        self.plan = plan
        self.device = settings.device
        self._dtype, self._tf32 = settings.master_dtype, settings.tf32
        self._pipeline, self._units, self._reader = parts.pipeline, parts.units, parts.reader
        self.locals: list[LocalParameter] = [local for unit in self._units for local in unit.locals]
        """This rank's part of each parameter, in the model's order."""
        self._exchanges, self._loss_replicas, self._shapes = parts.exchanges, parts.loss_replicas, parts.shapes
        self.buffers = parts.buffers
        """What checkpoints hold besides parameters."""
        self._seed, self._iteration = settings.seed, 0
        self.named_batch: Callable[[Any], Batch] = _as_it_is
        """A batch in the user's own form as named tensors."""
        strategies = [Strategy.parse(layer.strategy) for stage in plan.stages for layer in stage.layers]
        self._forward_once = plan.micro_batches == 1 and not any(own.recompute or own.graded for own in strategies)
        self._checks_buffers = dist.get_world_size() > 1 or not self._forward_once
        """Whether to see after the next batch that forward changes none by what a rank has of it."""
        self.compares_batches = compared_here()
        """Whether the next batch is compared between ranks: the first is, and that after this was set again."""
        self.training = True
        """Whether :meth:`forward_backward` drops out, as ``train()`` and ``eval()`` say."""
        self._hooks = [hooks_of(local.master) for local in self.locals]
        self._nothing = nn.Parameter(torch.empty(0, device=self.device, dtype=self._dtype))
        self._places = {name: place for place, name in enumerate(self._shapes)}
        self._parts_in_loss: tuple[list[str], Tensor] | None = None
        watch(self)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(advice(name))

    def __call__(self, *_: Any, **__: Any) -> PendingLoss:
        """Refused: a batch goes forward and backward at once."""
        raise InvalidInput(
            "model(…): forward and backward of a batch run together; call model.forward_backward(batch), or "
            "model.evaluate(batch) for the loss alone"
        )

    def __deepcopy__(self, memo: Any) -> ParallelModel:
        """Refused, for ``AveragedModel`` and others that copy what they are given."""
        raise InvalidInput(
            "model: one rank's share of it cannot be copied (copy.deepcopy, AveragedModel); to average weights, keep "
            "copies of model.parameters() and update these after each step"
        )

    def __reduce__(self) -> Any:
        """Refused, for ``torch.save(model)``."""
        raise InvalidInput(f"model: it cannot be pickled (torch.save), because {SAVE}")

    def __iter__(self) -> Iterator[Any]:
        """Refused, for functions that take parameters."""
        raise InvalidInput("model: it is no list of parameters; give model.parameters()")

    def train(self, mode: bool = True) -> ParallelModel:
        """Drop out in training, which is how it starts; False: do not."""
        self.training = mode
        self._pipeline.stage.train(mode)
        return self

    def eval(self) -> ParallelModel:
        """Do not drop out, in :meth:`forward_backward` either; :meth:`evaluate` never does."""
        return self.train(False)

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return dist.get_rank()

    @property
    def random_state(self) -> RandomState:
        """What the next random numbers depend on; set it to go on where another run was."""
        return RandomState(self._seed, self._iteration)

    @random_state.setter
    def random_state(self, state: RandomState) -> None:
        self._seed, self._iteration = state.seed, state.iteration
        self._pipeline.stage.seed(state.seed)

    # What an optimizer needs

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parts by the names of the stock model. Where nothing on this rank trains (its stage is frozen),
        an empty one follows, ``nothing``: optimizers of what trains, which scripts make on all ranks, refuse to be
        given nothing."""
        for local in self.locals:
            yield local.name, local.master
        if not any(local.trained for local in self.locals):
            yield "nothing", self._nothing

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same without names."""
        for _, parameter in self.named_parameters():
            yield parameter

    def optimizer(
        self, kind: Callable[..., Optimizer] | None = None, *, decay_vectors: bool = True, **options: Any
    ) -> Optimizer:
        """An optimizer over this rank's parameters, fused where PyTorch has that; None: the one the plan is for.

        ``decay_vectors`` False: weight decay for matrices only, not for biases and norms, as is usual.
        """
        kind = kind or torch_class(optimizer_named(self.plan.model.training.optimizer))
        if has_fused(kind) and "foreach" not in options:
            options.setdefault("fused", True)
        matrices = [local.master for local in self.locals if len(local.shard.shape) > 1]
        vectors = [local.master for local in self.locals if len(local.shard.shape) <= 1]
        groups: list[Any] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        made = kind(list(self.parameters()) if decay_vectors else groups, **options)
        check_optimizer_kind(made, self.locals)
        return made

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, as ``optimizer.zero_grad()`` does."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient; the same on every rank."""
        return gradient_norm(self.locals, self.device)

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale gradients so that their norm is at most ``limit``; returns the norm before."""
        norm = self.gradient_norm()
        clip_(self.locals, norm, limit)
        return norm

    def compare_replicas(self) -> None:
        """Raise :class:`galvatron.Unequal` on all ranks if some that hold the same part of a parameter do not agree."""
        compare_replicas(self.locals, self.device)

    # The whole model

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters of the model by their stock names, tied ones once, in the model's order."""
        return self._shapes

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(stock name, whole tensor) of each parameter in turn, on every rank; all ranks must take all of them."""
        return whole(self.locals, self._shapes, lambda local: local.master, self.device, self._dtype)

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The same for gradients."""
        return whole(self.locals, self._shapes, lambda local: local.master.grad, self.device, self._dtype)

    # Training

    def local_batches(self, batches: Iterable[Any]) -> Iterator[LocalBatch]:
        """This rank's part of each batch; every rank must be given the same batches."""
        for batch in batches:
            yield self._local(batch)

    def rows_read(self) -> dict[str, frozenset[int]]:
        """Of each input but the labels, the rows of a whole batch that this rank reads; others may hold anything."""
        return self._reader.rows_read()

    def forward_backward(self, batch: Any) -> PendingLoss:
        """Run all micro-batches; afterwards gradients are complete. Returns the mean loss, the same on every rank; read
        it late (after the optimizer's step), because that waits for all stages. Where a parameter had no part in the
        loss here, this waits for them, to know whether it had one elsewhere.

        Gradients add up until they are dropped (``optimizer.zero_grad()``), as in PyTorch.
        """
        local = self._local(batch)
        if self.compares_batches and local.figures is not None:
            compare_batches(local.figures, self.device)
            self.compares_batches = False
        self._check_parameters()
        earlier = self._set_aside()
        for own in self.locals:
            own.came = False
        for unit in self._units:
            unit.refresh()
            unit.begin()
        if self._checks_buffers:
            self.buffers.remember()
        with restored(self.device), products(tf32=self._tf32):
            loss = self._pipeline.run(local, self._iteration)
        if self._checks_buffers:
            self.buffers.check(self.device, once=self._forward_once)
            self._checks_buffers = False
        for unit in self._units:
            unit.finish()
            unit.sum_partial()
        for parameter, exchange in self._exchanges:
            if parameter.master.grad is not None:
                exchange(parameter.master.grad)
        mean = self._mean(loss, local.mark, self._came())
        self._drop_gradients_of_none(mean)
        for parameter, gradient in earlier:
            parameter.master.grad = gradient if parameter.master.grad is None else parameter.master.grad.add_(gradient)
        self._iteration += 1
        return mean

    def _came(self) -> Tensor:
        """1 for each parameter of the model that had a part in the loss on this rank."""
        names = [own.name for own in self.locals if own.came]
        if self._parts_in_loss is None or self._parts_in_loss[0] != names:  # the same in nearly every iteration
            places = {self._places[name] for name in names}
            flags = [float(place in places) for place in range(len(self._places))]
            self._parts_in_loss = names, torch.tensor(flags, dtype=torch.float64, device=self.device)
        return self._parts_in_loss[1]

    def _drop_gradients_of_none(self, mean: PendingLoss) -> None:
        """Ranks sum what they all have, so a parameter without a part in the loss gets a gradient of zeros where others
        of its layer are summed. Where it had none on any rank it has no gradient, as in one process: optimizers would
        decay it."""
        zeros = [own for own in self.locals if not own.came and own.master.grad is not None]
        counts = mean.others() if zeros else []
        for own in zeros:
            if not counts[self._places[own.name]]:
                own.master.grad = None

    def _local(self, batch: Any) -> LocalBatch:
        if isinstance(batch, LocalBatch):
            return batch
        return self._reader.local(self.named_batch(batch), compared=self.compares_batches)

    @contextmanager
    def timed(self) -> Iterator[PassTimer]:
        """Take the time of this rank's forward, backward and waiting for neighbours (``receive``) meanwhile."""
        self._pipeline.pass_timer = PassTimer(self.device)
        try:
            yield self._pipeline.pass_timer
        finally:
            self._pipeline.pass_timer = None

    def _check_parameters(self) -> None:
        """Gradients are summed, and parameters held, by what was frozen at first: a change would be ignored."""
        for local, own_hooks in zip(self.locals, self._hooks, strict=True):
            if hooks_of(local.master) != own_hooks:
                raise InvalidInput(
                    f"{local.name}: has a hook, which would not run or see a part of the gradient; remove it, and look "
                    "at gradients after forward_backward, when they are complete"
                )
            if local.master.requires_grad != local.trained:
                done, was = ("unfrozen", "frozen") if local.master.requires_grad else ("frozen", "trained")
                raise InvalidInput(
                    f"{local.name}: was {done} after parallelize, which is settled by then; set requires_grad back, "
                    f"and choose what is {was} in the model that you give to galvatron.plan and parallelize"
                )

    def _set_aside(self) -> list[tuple[LocalParameter, Tensor]]:
        """Gradients of earlier calls, which are already summed over ranks and must not be summed again."""
        earlier = [(local, local.master.grad.clone()) for local in self.locals if local.master.grad is not None]
        for local, _ in earlier:
            local.master.grad = None
        return earlier

    def evaluate(self, batch: Any) -> PendingLoss:
        """The mean loss without gradients and without dropout."""
        local = self._local(batch)
        for unit in self._units:
            unit.refresh()
        self._pipeline.stage.eval()
        try:
            with products(tf32=self._tf32):
                loss = self._pipeline.evaluate(local, self._iteration)
        finally:
            self._pipeline.stage.train(self.training)
            for unit in self._units:
                unit.end_evaluation()
        return self._mean(loss, local.mark)

    def _mean(self, loss: Tensor | None, mark: Tensor, others: Tensor | None = None) -> PendingLoss:
        """Put the last stage's sums together; ``others`` are summed over ranks in the same message, as is what tells
        whether all were given the same labels."""
        count = 0 if others is None else len(others)
        totals = torch.zeros(1 + count + 2, device=self.device, dtype=torch.float64)
        if loss is not None:
            totals[0] += loss.double() / self._loss_replicas
        if others is not None:
            totals[1:-2] = others
        ranks = dist.get_world_size()
        if ranks == 1 or not compared_here():
            return PendingLoss(totals[:-2], dist.all_reduce(totals, async_op=True) if ranks > 1 else None)
        totals[-2:].fill_(mark)  # by value where it is on the CPU: a copy would wait for the GPU
        totals[-1] *= totals[-2]
        marks = Marks(ranks, exact=not mark.is_floating_point())
        return PendingLoss(totals, dist.all_reduce(totals, async_op=True), marks)
