"""Single layers, as the runtime runs them on one rank: built by its own parts, timed and weighed.

A layer is a stage of its own here, in a world where the other ranks of its TP group do not exist.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import GPIPE, ModelSpec, Precision, Strategy
from galvatron.families.build import build_meta
from galvatron.families.generic.image_examples import example_of
from galvatron.families.generic.layers import Bridge, Embedding, Head
from galvatron.families.layer import Activations, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.measure.layer_jobs.probes import LayerBytes, LayerProbe, Variant
from galvatron.measure.rehearsal.memory import meter_for
from galvatron.measure.rehearsal.weights import CheapWeights
from galvatron.measure.timing import Probe, seconds_of_calls
from galvatron.processes.peers import Peers
from galvatron.runtime.assembly import Assembly, RankStage, assemble, sums_rows
from galvatron.runtime.batches import MicroBatch, Reader
from galvatron.runtime.buffer_types import buffers_follow
from galvatron.runtime.compiled import compiles
from galvatron.runtime.layout.groups import GroupPool, Position, StagePlan, needed_groups
from galvatron.runtime.layout.portions import Portion, Portions
from galvatron.runtime.products import check_tf32, products, tf32_of
from galvatron.runtime.settings import ComputeSettings

__all__ = ["Bench"]

_LOG = logging.getLogger(__name__)
_COMPILING_SHARE = 0.6
"""Of the time for measuring, after which nothing is compiled ahead."""
_SPREAD = 0.02
_CACHE_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}
"""Larger than what a device keeps near its arithmetic."""


class Bench:
    """Runs layers of one model on this rank's device."""

    def __init__(self, model: ModelSpec, peers: Peers, *, limit_s: float | None = None) -> None:
        if model.config is None:
            raise InvalidInput(f"model {model.name!r} is described by figures alone, so its layers cannot be run")
        check_tf32(model.training.precision, peers.device)
        self._model, self._peers = model, peers
        self._layered = self._made()
        self._weights = CheapWeights(self._layered)
        narrow = torch.bfloat16 if model.training.precision is Precision.BF16 else torch.float32
        self._settings = ComputeSettings(
            device=peers.device,
            dtype=narrow,
            master_dtype=torch.float32,
            seed=0,
            buffers_follow=buffers_follow(self._layered, narrow),
            compile=compiles(model.training.compile, peers.device),
            tf32=tf32_of(model.training.precision),
        )
        self._begun, self._limit_s = time.monotonic(), limit_s
        self.left_out: list[Variant] = []
        """What is not measured, because the time for it was over."""
        self._assemblies: dict[Variant, Assembly] = {}
        self._pools: dict[Variant, GroupPool] = {}
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._elsewhere = torch.zeros(_CACHE_BYTES[peers.device.type] // 4, device=peers.device)

    def _made(self) -> LayeredModel:
        assert self._model.config is not None
        generic = self._model.family == "generic"
        stock = build_meta(self._model.config, self._model.training, as_named=generic)
        return layered_model(stock, example_of(stock, self._model.training), generic=generic)

    def probe(self, asked: LayerProbe) -> Probe:
        run = self._run(asked)
        clock = self._peers.compute_clock
        return Probe(lambda calls: seconds_of_calls(calls, run, self._peers.device, clock)[1::2])

    def fitting(self, probes: Sequence[LayerProbe]) -> dict[LayerProbe, Probe]:
        """Those of the probes that every rank has memory for beside all others' layers, each run once; most samples
        first."""
        probes = self._hold_all(probes)
        found: dict[LayerProbe, Probe] = {}
        for probe in probes:
            own, fits = None, True
            try:
                own = self.probe(probe)
                own.run(1)
            except torch.OutOfMemoryError:
                own, fits = None, False
            if all(self._peers.gather(fits)):
                assert own is not None
                found[probe] = own
                continue
            del own
            self._drop(probe.variant)  # what it has begun is of no use; others build on what was left
            found = {
                other: self.probe(other) if other.variant == probe.variant else run for other, run in found.items()
            }
            if self._peers.rank == 0:
                _LOG.warning(
                    "layer %r under %s is not measured with %g samples: the device has too little memory for them",
                    probe.variant.layer, probe.variant.strategy, probe.size,
                )  # fmt: skip
        asked, counts = (Counter(probe.variant for probe in some) for some in (probes, found))
        # Where a line was asked for, one point is none.
        return {probe: run for probe, run in found.items() if counts[probe.variant] >= min(asked[probe.variant], 2)}

    def late(self) -> bool:
        """Whether the time that there is for measuring is over on some rank."""
        return self._limit_s is not None and any(self._peers.gather(self._used_s() > self._limit_s))

    def _used_s(self) -> float:
        return time.monotonic() - self._begun

    def _hold_all(self, probes: Sequence[LayerProbe]) -> list[LayerProbe]:
        """Have the weights and gradients of all layers: a probe must still fit when the last one has come. Whole layers
        come first, and are held however late it is; returns the probes of what is held."""
        variants = sorted(dict.fromkeys(probe.variant for probe in probes), key=lambda own: not own.whole)
        left_out: set[Variant] = set()
        for variant in variants:
            if left_out or (not variant.whole and self.late()):
                left_out.add(variant)
                continue
            fewest = min((probe for probe in probes if probe.variant == variant), key=lambda one: one.size)
            try:
                self.probe(fewest).run(1)
            except torch.OutOfMemoryError:
                self._drop(variant)
        self._kept.clear()  # most samples come first from here on
        self.left_out += [variant for variant in variants if variant in left_out]
        return [probe for probe in probes if probe.variant not in left_out]

    def compile_ahead(self, probes: Sequence[LayerProbe]) -> None:
        """Each rank runs some of the layers once: so they are compiled at the same time, and all ranks then find them
        in PyTorch's cache. Else the ranks would come with the same layer and wait for the one that compiles it."""
        peers = self._peers
        if not self._settings.compile or peers.local_world == 1:
            return
        variants = sorted(dict.fromkeys(probe.variant for probe in probes), key=lambda own: not own.whole)
        mine = variants[peers.rank % peers.local_world :: peers.local_world]
        for done, variant in enumerate(mine):
            if self._limit_s is not None and self._used_s() > _COMPILING_SHARE * self._limit_s:
                break
            peers.report(done, len(mine), "compiling layers")
            own = [probe for probe in probes if probe.variant == variant]
            for probe in sorted(own, key=lambda one: -one.size):
                with suppress(torch.OutOfMemoryError):  # of it more is said when it is measured
                    self.probe(probe).run(1)
            self.clear()
        peers.meet()

    def clear(self) -> None:
        """Let go of all layers."""
        for variant in list(self._assemblies):
            self._drop(variant)
        self._kept.clear()

    def _drop(self, variant: Variant) -> None:
        self._assemblies.pop(variant, None)
        self._pools.pop(variant, None)
        gc.collect()
        if self._peers.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self, probes: Sequence[LayerProbe]) -> list[LayerBytes]:
        """Of one variant, for the fewest and the most samples: what is between them is what the samples take. Beside
        one long sample nothing counts."""
        few, many = (pick(probes, key=lambda one: one.size) for pick in (min, max))
        return [LayerBytes(samples=0, saved=0, transient=0) if few == many else self._weigh(few), self._weigh(many)]

    def _weigh(self, probe: LayerProbe) -> LayerBytes:
        run = _Run(self, probe)
        run.forward()
        run.backward()  # so that gradients have their place
        meter = meter_for(self._peers.device)
        with meter:
            with meter.phase("forward"):
                run.forward()
            with meter.phase("backward"):
                run.backward()
        before, after = meter.phases["forward"], meter.phases["backward"]
        # A layer keeps its input, which is older than the meter here; its output is the next one's.
        saved = after.start - before.start + run.input_bytes - run.output_bytes
        return LayerBytes(samples=probe.size, saved=saved, transient=after.peak - after.start)

    def _run(self, probe: LayerProbe) -> Callable[[Callable[[], None]], None]:
        run = _Run(self, probe)

        def parts(mark: Callable[[], None]) -> None:
            for work in (run.forward, run.backward):
                self._forget()
                mark()
                work()
                mark()

        return parts

    def _forget(self) -> None:
        """Push weights and activations out of caches: in a model, other layers come between a layer's passes."""
        self._elsewhere += 1

    # What a run is made of

    def assembly(self, variant: Variant) -> Assembly:
        """One for all numbers of samples: its weights take memory."""
        if variant not in self._assemblies:
            stage = self._stage(variant)
            rows = variant.parts_of_a_batch
            needed = needed_groups([stage], rows, self._layered.ties, GPIPE, sums_rows=sums_rows(self._layered))
            pool = self._pools[variant] = GroupPool(needed, self._settings.device)
            mine = RankStage(plan=stage, stages=[stage], portions=Portions(stage.strategies, rows), rank=0)
            # What is around the blocks of an unknown family is changed where it is: it needs a model of its own.
            around = isinstance(self._layered.layers[variant.index], Embedding | Bridge | Head)
            layered = self._made() if around else self._layered
            self._assemblies[variant] = assemble(layered, mine, pool, self._weights, self._settings)
            for unit in self._assemblies[variant].units:
                unit.refresh()
                unit.begin()
        return self._assemblies[variant]

    def _stage(self, variant: Variant) -> StagePlan:
        return StagePlan(
            ranks=tuple(range(variant.ranks)), first=variant.index, strategies=(Strategy.parse(variant.strategy),)
        )

    def inputs(self, probe: LayerProbe) -> tuple[Activations, MicroBatch, int]:
        """Random activations, the micro-batch they belong to, and how many targets that has."""
        generator = torch.Generator().manual_seed(0)
        variant, samples = probe.variant, probe.samples
        rows = samples * variant.parts_of_a_batch
        batch = self._layered.example(rows, self._model.training.sequence_length, generator)
        needs = [self._layered.layers[variant.index].inputs]
        stage = self._stage(variant)
        portions = Portions(stage.strategies, rows)
        reader = Reader(self._layered, needs, portions, 0, micro_batches=1, settings=self._settings)
        reader.context_groups = self._names(variant)
        local = reader.local(batch)
        parts = variant.ulysses * (variant.tp if variant.sequence_parallel else 1)
        shapes = self._layered.carried(variant.index, local.shapes) if variant.index else ()
        tensors = tuple(
            self._random(number, samples, (shape[0] // parts, *shape[1:])) for number, shape in enumerate(shapes)
        )
        return tensors, local.micro_batches[0], local.targets

    def _names(self, variant: Variant) -> Callable[[Portion], tuple[str, str]]:
        pool, position = self._pools[variant], Position(self._stage(variant).ranks, 0)

        def names(portion: Portion) -> tuple[str, str]:
            assert portion.context is not None
            return pool.context_names(position, portion.context)

        return names

    def _random(self, number: int, samples: int, shape: tuple[int, ...]) -> Tensor:
        """A layer's input of that number. It is only read, so all runs have it in one place; ask for the most samples
        first."""
        kept = self._kept.get((number, *shape))
        if kept is None or len(kept) < samples:
            kept = torch.empty((samples, *shape), dtype=self._settings.dtype, device=self._settings.device)
            self._kept[number, *shape] = kept.normal_(std=_SPREAD)
        return kept[:samples].detach().requires_grad_()

    @property
    def tf32(self) -> bool | None:
        return self._settings.tf32

    def is_last(self, variant: Variant) -> bool:
        return variant.index == len(self._layered.layers) - 1


class _Run:
    """One layer with the samples it is given again and again."""

    def __init__(self, bench: Bench, probe: LayerProbe) -> None:
        variant = probe.variant
        self._assembly, self._tf32 = bench.assembly(variant), bench.tf32
        self._inputs, self._micro_batch, self._targets = bench.inputs(probe)
        self._first, self._last = variant.index == 0, bench.is_last(variant)
        self._outputs: Activations = ()
        self.input_bytes = _bytes(self._inputs)
        self.output_bytes = 0

    def forward(self) -> None:
        with products(tf32=self._tf32):
            self._forward()

    def backward(self) -> None:
        with products(tf32=self._tf32):
            self._backward()

    def _forward(self) -> None:
        if self._first:
            self._micro_batch.release()  # masks and positions are made once a micro-batch: in its first layer
        self._outputs = self._assembly.stage(self._inputs, self._micro_batch, (0, 0))
        self.output_bytes = _bytes(self._outputs)

    def _backward(self) -> None:
        outputs, self._outputs = self._outputs, ()
        for unit in self._assembly.units:
            unit.expect_backward(last=False)
        if self._last:
            torch.autograd.backward(outputs[0] / self._targets)  # its other term, if it has one, costs nothing
        else:
            flowing = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(flowing, [_gradient(output) for output in flowing])
        for tensor in self._inputs:
            tensor.grad = None


def _bytes(tensors: Activations) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gradient(output: Tensor) -> Tensor:
    return torch.full_like(output, 1e-3)
