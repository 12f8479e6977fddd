"""Runs micro-batches through one rank's stage in the order of the schedule, and talks to the neighbouring stages."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron.core.spec import Action, Pass
from galvatron.families.layer import Activations
from galvatron.runtime.batches import LocalBatch
from galvatron.runtime.collectives import finish
from galvatron.runtime.pipeline.stage import Stage
from galvatron.runtime.pipeline.transfer import StageTransfer

__all__ = ["Borders", "Neighbours", "PassTimer", "Pipeline"]


class PassTimer:
    """What training spends its time on: adds up the time of each kind of pass, and of waiting, since the last
    :meth:`take`. (What repeats a piece of work to time it is :func:`galvatron.measure.timing.seconds_of_calls`.)"""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans.append((name, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds by name; the next ones are counted anew. Waits until the device has come so far."""
        for name, begin, end in self._spans:
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) / 1e3
        self._spans.clear()
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The transfers of one stage; None at the ends of the pipeline."""

    receive_forward: StageTransfer | None = None
    send_forward: StageTransfer | None = None
    receive_backward: StageTransfer | None = None
    send_backward: StageTransfer | None = None


_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of activations. A model may carry them in another type than its weights have (a residual in fp32)."""


@dataclass
class Borders:
    """Types of the activations that cross the stage's borders, and which of them have gradients.

    Where nothing before a border trains, none has a gradient. Elsewhere some may have none (what a frozen encoder or
    vision tower made, that travels beside what a decoder makes). The sending stage finds all this out in its first
    forward, and tells once for training and once for evaluation.
    """

    before: bool = True
    """Whether anything before the stage trains."""
    _heard: dict[bool, tuple[tuple[torch.dtype, bool], ...]] = field(default_factory=dict)
    """By whether it trains."""
    _told: set[bool] = field(default_factory=set)

    def heard(self, transfer: StageTransfer, count: int, device: torch.device) -> tuple[tuple[torch.dtype, bool], ...]:
        """Of each of the stage's inputs its type, and whether it has a gradient."""
        trains = torch.is_grad_enabled()
        if trains not in self._heard:
            codes = torch.zeros(count, dtype=torch.uint8, device=device)
            transfer.hear(codes)
            self._heard[trains] = tuple((_TYPES[code // 2], self.before and code % 2 > 0) for code in codes.tolist())
        return self._heard[trains]

    def tell(self, transfer: StageTransfer, outputs: Activations) -> None:
        """Tell the next stage of its inputs, before they are first sent."""
        trains = torch.is_grad_enabled()
        if trains not in self._told:
            codes = [2 * _TYPES.index(output.dtype) + output.requires_grad for output in outputs]
            transfer.tell(torch.tensor(codes, dtype=torch.uint8, device=outputs[0].device))
            self._told.add(trains)


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward. Keeps no outputs: backward starts from their edges."""

    inputs: Activations
    """Those that have a gradient."""
    edges: tuple[GradientEdge, ...] = ()
    """Of the outputs that have one; none: nothing up to here trains, so there is no backward."""
    outlines: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    """Of these outputs."""
    loss: Tensor | None = None
    """Of the last stage: this rank's part of the micro-batch's part of the mean loss."""


@dataclass(kw_only=True)
class Pipeline:
    """One stage of the pipeline."""

    stage: Stage
    neighbours: Neighbours
    actions: Sequence[Action]
    input_shapes: Callable[[LocalBatch], Sequence[tuple[int, ...]]]
    """Of this rank's part of what the stage receives for a micro-batch."""
    device: torch.device
    expect_backward: Callable[[bool], None]
    """Called before each backward, with whether it is the last."""
    borders: Borders = field(default_factory=Borders)
    pass_timer: PassTimer | None = None
    """Takes the time of forward, backward and waiting for neighbours while there is one."""
    _sending: dict[StageTransfer, list[tuple[dist.Work, list[Tensor]]]] = field(default_factory=dict)

    def run(self, batch: LocalBatch, iteration: int) -> Tensor | None:
        """Forward and backward of all micro-batches; in the last stage the loss of this rank's rows, over targets."""
        passes: dict[int, _Pass] = {}
        losses: list[Tensor] = []
        left = sum(action.kind is Pass.BACKWARD for action in self.actions)
        for action in self.actions:
            self._let_go()
            if action.kind is Pass.FORWARD:
                inputs, outputs = self._forward(batch, action.micro_batch, iteration)
                inputs = tuple(tensor for tensor in inputs if tensor.requires_grad)
                if self.neighbours.send_forward is None:
                    passes[action.micro_batch] = _Pass(inputs, loss=_loss(outputs, batch))
                else:
                    outputs = tuple(output for output in outputs if output.requires_grad)
                    edges = tuple(get_gradient_edge(output) for output in outputs)
                    outlines = tuple((output.shape, output.dtype) for output in outputs)
                    passes[action.micro_batch] = _Pass(inputs, edges, outlines)
                del inputs, outputs
            else:
                left -= 1
                done = passes.pop(action.micro_batch)
                if done.loss is not None:
                    losses.append(done.loss.detach())
                if done.loss is not None or done.edges:
                    self.expect_backward(left == 0)
                    self._backward(done, action.micro_batch)
                batch.micro_batches[action.micro_batch].release()
        self._finish_sending()
        return torch.stack(losses).sum() if losses else None

    def evaluate(self, batch: LocalBatch, iteration: int) -> Tensor | None:
        """Forward only."""
        losses: list[Tensor] = []
        with torch.no_grad():
            for number in range(len(batch.micro_batches)):
                _, outputs = self._forward(batch, number, iteration)
                if self.neighbours.send_forward is None:
                    losses.append(_loss(outputs, batch))
                batch.micro_batches[number].release()
        self._finish_sending()
        return torch.stack(losses).sum() if losses else None

    def _forward(self, batch: LocalBatch, number: int, iteration: int) -> tuple[Activations, Activations]:
        inputs: Activations = ()
        if self.neighbours.receive_forward is not None:
            shapes = self.input_shapes(batch)
            with self._timed("receive", number):
                heard = self.borders.heard(self.neighbours.receive_forward, len(shapes), self.device)
                inputs = tuple(
                    torch.empty(shape, dtype=dtype, device=self.device)
                    for shape, (dtype, _) in zip(shapes, heard, strict=True)
                )
                self.neighbours.receive_forward.receive(inputs)
            for tensor, (_, has_gradient) in zip(inputs, heard, strict=True):
                tensor.requires_grad_(has_gradient)
        with self._timed("forward", number):
            outputs: Activations = self.stage(inputs, batch.micro_batches[number], (iteration, number))
        if self.neighbours.send_forward is not None:
            self.borders.tell(self.neighbours.send_forward, outputs)
            self._send(self.neighbours.send_forward, outputs)
        return inputs, outputs

    def _backward(self, done: _Pass, number: int) -> None:
        gradients = self._received(done.outlines, number) if done.loss is None else None
        with self._timed("backward", number):
            torch.autograd.backward(done.edges if done.loss is None else done.loss, gradients)
        del gradients
        if self.neighbours.send_backward is not None and done.inputs:
            self._send(self.neighbours.send_backward, [_gradient(tensor) for tensor in done.inputs])

    def _received(self, outlines: Sequence[tuple[torch.Size, torch.dtype]], number: int) -> Activations:
        """The gradients of a micro-batch's outputs."""
        assert self.neighbours.receive_backward is not None
        gradients = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in outlines)
        with self._timed("receive", number):
            self.neighbours.receive_backward.receive(gradients)
        return gradients

    @contextmanager
    def _timed(self, name: str, number: int) -> Iterator[None]:
        """One pass of a micro-batch, or the wait for its input; profilers see it as a plan's trace names it."""
        timer: AbstractContextManager[None] = nullcontext() if self.pass_timer is None else self.pass_timer(name)
        with torch.profiler.record_function(f"{name} {number}"), timer:
            yield

    def _send(self, transfer: StageTransfer, tensors: Sequence[Tensor]) -> None:
        """Start sending. The send before it over this transfer is waited for: its receiver, which asked for it first,
        cannot be waiting for this one. So no more than one is held, however late its receiver, and however far a
        GPU's host runs ahead of it."""
        self._wait_for(self._sending.pop(transfer, []))
        self._sending.setdefault(transfer, []).extend(transfer.send(tensors))

    def _let_go(self) -> None:
        """Drop what has arrived."""
        for transfer, pending in self._sending.items():
            self._sending[transfer] = [(work, buffer) for work, buffer in pending if not work.is_completed()]

    def _finish_sending(self) -> None:
        for pending in self._sending.values():
            self._wait_for(pending)
        self._sending.clear()

    @staticmethod
    def _wait_for(pending: list[tuple[dist.Work, list[Tensor]]]) -> None:
        finish(work for work, _ in pending)


def _loss(outputs: Activations, batch: LocalBatch) -> Tensor:
    """What a micro-batch adds to the mean loss: its sum over the targets of the batch, and its own term, of which the
    loss has the mean over micro-batches."""
    loss, *terms = outputs
    # Of no target PyTorch's mean is no number, but its gradient is zero: weights stay what they are.
    mean = loss / batch.targets if batch.targets else 0.0 * loss + math.nan
    return sum((term / len(batch.micro_batches) for term in terms), start=mean)


def _gradient(tensor: Tensor) -> Tensor:
    """Of a stage's input; zero for one that has no part in the loss."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
