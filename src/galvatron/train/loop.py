"""The training loop of one rank. All ranks take the same turns at the same steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from galvatron.core.errors import NonFinite, Unequal
from galvatron.core.units import format_seconds
from galvatron.processes.stopping import Agreement, StopRequest
from galvatron.processes.watch import Watch
from galvatron.runtime.compiled import compiler
from galvatron.runtime.figures import Figures
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.optimizers import skipped_unless_finite, skips_itself
from galvatron.runtime.pending_loss import PendingLoss
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.data.dataset import Dataset, evaluation_batches
from galvatron.train.data.loader import Loader
from galvatron.train.meters import IterationTimes, PeakMemory, used_bytes
from galvatron.train.metrics import Sink, Throughput
from galvatron.train.phases import Phases
from galvatron.train.progress import Display
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings, learning_rate

__all__ = ["Loop", "Outcome", "mean_loss"]

_FIRST = "first step, in which memory is allocated and blocks are compiled"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended."""

    step: int
    stopped: bool
    """By a signal, before the last step."""
    losses: tuple[float, ...]
    """Of the steps that this process ran."""


@dataclass(kw_only=True)
class Loop:
    """What a rank trains with."""

    folder: RunFolder
    settings: Settings
    model: ParallelModel
    optimizer: Optimizer
    loader: Loader
    held_out: Dataset | None
    checkpoints: Checkpoints
    watch: Watch
    stop: StopRequest
    agreement: Agreement
    times: IterationTimes
    memory: PeakMemory
    sinks: list[Sink]
    """Empty on all ranks but 0."""
    display: Display | None
    """Of rank 0."""
    device_name: str
    phases: Phases
    step: int = 0
    """The last one done."""

    def run(self) -> Outcome:
        losses: list[float] = []
        first = self.step
        stopped = False
        began, before = time.monotonic(), sum(self.phases.seconds.values())
        for step in range(first + 1, self.settings.steps + 1):
            last = step == self.settings.steps
            saves = last or self._due(self.settings.save_every, step)
            due = last if self.settings.evaluate_every is None else self._due(self.settings.evaluate_every, step)
            evaluates = self.held_out is not None and due
            compares = self._due(self.settings.compare_every or None, step)
            traced = self.settings.trace_step == step
            first_one = self.phases.phase("first step", _FIRST) if step == first + 1 else nullcontext()
            timed = self.times.step(plain=not traced, followed=not (evaluates or compares or saves))
            with first_one, timed, self._traced(step) if traced else nullcontext():
                self.agreement.ask(self.stop.made)
                figures = self._iteration(step)
                stopped = self.agreement.answer() and not last
            self.step = step
            losses.append(figures["loss"])
            self.memory.step_done(step - first)
            if evaluates:
                with self.phases.phase("evaluation"):
                    figures["evaluation_loss"] = self._evaluate(step)
                self.memory.phase_done("evaluating")
            self._show(step, figures)
            if step == first + 1:
                self._say_compiled()
            if compares:
                self._compare_replicas(step)
                self.memory.phase_done("comparing")
            if saves or stopped:
                with self.phases.phase("saving", "saving a checkpoint"):
                    self._save(step, wait=last or stopped)
                self.memory.phase_done("saving")
            if stopped:
                break
        with self.phases.phase("saving", "saving a checkpoint"):
            self.checkpoints.finish()
        self.phases.add("steps", time.monotonic() - began - sum(self.phases.seconds.values()) + before)
        return Outcome(self.step, stopped, tuple(losses))

    @staticmethod
    def _due(every: int | None, step: int) -> bool:
        return every is not None and step % every == 0

    def _iteration(self, step: int) -> dict[str, float]:
        before = self.loader.position
        self.watch.at(step, "data")
        with self.times.data():
            batch = next(self.loader)
        self.watch.at(step, "forward and backward")
        rate = learning_rate(step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.compares_batches |= self._due(self.settings.compare_every or None, step)
        loss = self.model.forward_backward(batch)
        clip = self.settings.clip
        norm = self.model.gradient_norm() if clip is None else self.model.clip_gradients(clip)
        value = loss.tensor()
        found = Figures(value, norm)
        if skips_itself(self.optimizer):
            # Then the device need not wait for this process to read both figures. And while it updates weights, this
            # process gets the next batch ready.
            with skipped_unless_finite(self.optimizer, value, norm):
                self._optimizer_step(step)
        figures = {**dict(zip(("loss", "gradient_norm"), found.read(), strict=True)), "learning_rate": rate}
        self._check_finite(step, loss, figures, before.samples_seen)
        if not skips_itself(self.optimizer):
            self._optimizer_step(step)
        return figures

    def _optimizer_step(self, step: int) -> None:
        self.watch.at(step, "optimizer")
        with torch.profiler.record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _check_finite(self, step: int, loss: PendingLoss, figures: dict[str, float], samples_before: int) -> None:
        """Both figures are the same on every rank, so all of them stop here, before any weight changes."""
        wrong = [name for name in ("loss", "gradient_norm") if not math.isfinite(figures[name])]
        if not wrong:
            return
        with self._named(step):
            loss.item()  # raises where ranks were given different labels, and so have no loss
        batch = self.model.plan.batch
        indices = [index for _, index in self.loader.indices(samples_before, batch)]
        message = (
            f"step {step}: the {' and the '.join(name.replace('_', ' ') for name in wrong)} is not finite (loss "
            f"{figures['loss']}, gradient norm {figures['gradient_norm']}); weights are as after step {step - 1}. "
            f"Its {batch} samples are listed in {self.folder.failure_file}; look at them, or lower the learning rate"
        )
        if self.model.rank == 0:
            self.folder.write_failure({"message": message, "step": step, **figures, "samples": indices})
        self.checkpoints.finish()
        raise NonFinite(message)

    def _compare_replicas(self, step: int) -> None:
        """Before a checkpoint of the step is written: a wrong one must not take the place of a right one."""
        self.watch.at(step, "comparing replicas")
        with self._named(step):
            self.model.compare_replicas()

    @contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """What is unequal, with the step; checkpoints that are being written are finished first."""
        try:
            yield
        except Unequal as error:
            self.checkpoints.finish()
            raise Unequal(f"step {step}: {error}") from None

    def _evaluate(self, step: int) -> float:
        self.watch.at(step, "evaluation")
        assert self.held_out is not None
        batch = self.model.plan.batch
        count = self.settings.evaluated_batches
        batches = evaluation_batches(self.held_out, batch=batch, most=None if count is None else batch * count)
        return mean_loss(self.model, batches, lambda count: self.watch.at(step, f"evaluation after {count} targets"))

    def _save(self, step: int, *, wait: bool) -> None:
        self.watch.at(step, "saving")
        self.checkpoints.save(
            self.model, self.optimizer, {"data": self.loader.position.to_json()}, step=step, wait=wait
        )

    def _show(self, step: int, figures: dict[str, float]) -> None:
        if self.display is None:
            return
        speed = Throughput.of(self.model.plan, self.times.last_s, self.device_name)
        figures["iteration_s"] = self.times.last_s
        figures["samples_per_s"] = speed.samples_per_s
        if speed.tokens_per_s is not None:
            figures["tokens_per_s"] = speed.tokens_per_s
        if speed.peak_share is not None:
            figures["peak_share"] = speed.peak_share
        figures["memory_bytes"] = float(self.memory.bytes or used_bytes(self.model.device))
        figures["epoch"] = self.loader.epoch
        for sink in self.sinks:
            sink.write(step, figures)
        self.display.step(step, figures)
        if "evaluation_loss" in figures:
            self.display.evaluated(step, figures["evaluation_loss"])

    def _say_compiled(self) -> None:
        made = compiler()
        if self.display is not None and made.graphs:
            took = format_seconds(made.seconds)
            self.display.say(f"compiled {made.graphs} graphs in {took}; PyTorch's cache has them for later runs")

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """Write what the profiler sees of this step, each rank its own file, for chrome://tracing or Perfetto."""
        with torch.profiler.profile() as profile, torch.profiler.record_function(f"step {step}"):
            yield
        profile.export_chrome_trace(str(self.folder.trace_file(self.model.rank)))


def mean_loss(
    model: ParallelModel, batches: Iterable[dict[str, Tensor]], counted: Callable[[int], None] | None = None
) -> float:
    """The mean loss over all targets of some batches: each batch has the weight of the targets that its own mean is
    over, and one without any has none. ``counted``: called with the targets so far."""
    total, count = 0.0, 0
    for batch in model.local_batches(batches):
        if batch.targets:
            total += float(model.evaluate(batch)) * batch.targets
            count += batch.targets
        if counted is not None:
            counted(count)
    return total / count if count else math.nan
