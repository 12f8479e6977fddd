"""Runs micro-batches through one rank's stage in the order of the schedule, and talks to the neighbouring stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.models.layer import Activations
from galvatron.runtime.batches import LocalBatch
from galvatron.runtime.schedule import Action
from galvatron.runtime.stage import Stage
from galvatron.runtime.transfer import Crossing

__all__ = ["Neighbours", "Pipeline"]


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The crossings of one stage; None at the ends of the pipeline."""

    receive_forward: Crossing | None = None
    send_forward: Crossing | None = None
    receive_backward: Crossing | None = None
    send_backward: Crossing | None = None


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward."""

    inputs: Activations
    outputs: Activations


@dataclass(kw_only=True)
class Pipeline:
    """One stage of the pipeline."""

    stage: Stage
    neighbours: Neighbours
    actions: Sequence[Action]
    empty_inputs: Callable[[LocalBatch], Activations]
    """Tensors to receive the stage's input in."""
    expect_backward: Callable[[bool], None]
    """Called before each backward, with whether it is the last."""
    _sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def run(self, batch: LocalBatch, iteration: int) -> Tensor | None:
        """Forward and backward of all micro-batches; the summed loss of this rank's rows, in the last stage."""
        passes: dict[int, _Pass] = {}
        losses: list[Tensor] = []
        left = sum(not action.forward for action in self.actions)
        for action in self.actions:
            if action.forward:
                passes[action.micro_batch] = self._forward(batch, action.micro_batch, iteration)
                if self.neighbours.send_forward is None:
                    losses.append(passes[action.micro_batch].outputs[0].detach())
            else:
                left -= 1
                self.expect_backward(left == 0)
                self._backward(passes.pop(action.micro_batch), batch)
        self._finish_sending()
        return torch.stack(losses).sum() if losses else None

    def evaluate(self, batch: LocalBatch, iteration: int) -> Tensor | None:
        """Forward only."""
        losses: list[Tensor] = []
        with torch.no_grad():
            for number in range(len(batch.micro_batches)):
                outputs = self._forward(batch, number, iteration).outputs
                if self.neighbours.send_forward is None:
                    losses.append(outputs[0])
        self._finish_sending()
        return torch.stack(losses).sum() if losses else None

    def _forward(self, batch: LocalBatch, number: int, iteration: int) -> _Pass:
        inputs: Activations = ()
        if self.neighbours.receive_forward is not None:
            inputs = self.empty_inputs(batch)
            self.neighbours.receive_forward.receive(inputs)
            for tensor in inputs:
                tensor.requires_grad_(torch.is_grad_enabled())
        outputs = self.stage(inputs, batch.micro_batches[number], (iteration, number))
        if self.neighbours.send_forward is not None:
            self._send(self.neighbours.send_forward, outputs)
        return _Pass(inputs, outputs)

    def _backward(self, done: _Pass, batch: LocalBatch) -> None:
        if self.neighbours.receive_backward is None:
            torch.autograd.backward(done.outputs[0] / batch.targets)
        else:
            gradients = tuple(torch.empty_like(output) for output in done.outputs)
            self.neighbours.receive_backward.receive(gradients)
            torch.autograd.backward(done.outputs, gradients)
        if self.neighbours.send_backward is not None:
            self._send(self.neighbours.send_backward, [_gradient(tensor) for tensor in done.inputs])

    def _send(self, crossing: Crossing, tensors: Sequence[Tensor]) -> None:
        self._sending = [(work, buffer) for work, buffer in self._sending if not work.is_completed()]
        self._sending += crossing.send(tensors)

    def _finish_sending(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending = []


def _gradient(tensor: Tensor) -> Tensor:
    """Of a stage's input; zero for one that has no part in the loss."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
