"""Measured times of a model's layers, which the planner prefers to figures derived from operations and rates.

Paper Section 3.4: "the per-sample computation time … could be measured by profiling real layer execution time".
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from galvatron.core.spec.figures import check_facts

__all__ = ["LayerGrade", "LayerMemory", "LayerTime", "ModelProfile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Time of one kind of layer on one device: samples × slope + a fixed part, and never below a least time."""

    layer: str
    """The layer's name in the model."""
    forward_s: float
    """Forward time of one more sample, of the part that one device computes."""
    backward_ratio: float = 2.0
    """Backward time over forward time; two for matrix products."""
    forward_fixed_s: float | None = None
    """What forward takes besides, however few the samples; None: the device's overhead of a layer."""
    backward_fixed_s: float | None = None
    """The same for backward; None: twice the device's overhead of a layer."""
    forward_least_s: float = 0.0
    """What a GPU's process takes to start the kernels of forward, where few samples are computed sooner."""
    backward_least_s: float = 0.0
    forward_sharded_s: float = 0.0
    """What forward takes more where parameters are sharded: hooks, copies out of messages. Not the messages."""
    backward_sharded_s: float = 0.0
    recompute_s: float = 0.0
    """What recomputing the layer takes besides a second forward."""
    parameters: int | None = None
    """Of the layer that was measured, so that no other is taken for it; None: nobody says."""
    forward_flops: int | None = None
    """Operations of one sample's forward in it, which tells of other lengths; None: nobody says."""
    tp: int = 1
    """Degree of tensor parallelism at which it was measured."""
    sequence_parallel: bool = False
    ep: int = 1
    """Degree of expert parallelism, beside data parallelism of the same degree. What tokens take between devices is not
    in it, what sorting them takes is."""
    fused_loss: bool = False

    def __post_init__(self) -> None:
        check_facts(self, f"times of {self.layer!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """Memory of one kind of layer on one device, for each sample."""

    layer: str
    activation_bytes: int
    """Saved for backward."""
    transient_bytes: int
    """Most that backward takes on top."""
    tp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_facts(self, f"memory of {self.layer!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGrade:
    """One kind of layer with some of its results kept and the rest recomputed, on one device without TP."""

    layer: str
    grade: str
    """As strategies write it: "rs", "ra"."""
    share: float
    """Of a sample's forward, what recomputing takes for each sample."""
    fixed_s: float = 0.0
    """What it takes besides, however few the samples."""
    activation_bytes: int
    """Saved for backward by one sample, the layer's input included."""

    def __post_init__(self) -> None:
        check_facts(self, f"grade {self.grade!r} of {self.layer!r}")


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Layers of one model on one kind of device; kinds that are missing are priced by their operations and sizes."""

    name: str
    times: tuple[LayerTime, ...]
    memory: tuple[LayerMemory, ...] = ()
    grades: tuple[LayerGrade, ...] = ()
    fragmentation: float | None = None
    """Part of a device's memory that plans leave to the allocator, in place of what the cluster says; None: that."""
    source: str = ""
    layers_digest: str = ""
    """:attr:`galvatron.core.spec.model.ModelSpec.layers_digest` of what was measured; empty: written by hand."""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """As plan files have it. What was measured without EP or a fused loss does not mention it, as before there was
        any: digests and files stay the same."""
        facts = asdict(self)
        if not self.layers_digest:
            del facts["layers_digest"]
        if self.fragmentation is None:
            del facts["fragmentation"]
        for time in facts["times"]:
            if time["ep"] == 1:
                del time["ep"]
            if not time["fused_loss"]:
                del time["fused_loss"]
            for name in ("parameters", "forward_flops"):
                if time[name] is None:
                    del time[name]
        if not self.grades:
            del facts["grades"]
        return facts

    def grade_of(self, layer: str, grade: str) -> LayerGrade | None:
        """What was measured of a kind of layer with some results kept."""
        return next((one for one in self.grades if (one.layer, one.grade) == (layer, grade)), None)

    def time_of(
        self, layer: str, tp: int = 1, *, sequence_parallel: bool = False, fused_loss: bool = False
    ) -> LayerTime | None:
        """What was measured nearest to this: at the largest degree that is not above it, with sequence parallelism or a
        fused loss only where that is asked for."""
        known = [
            time
            for time in self.times
            if (time.layer, time.ep) == (layer, 1)
            and time.tp <= tp
            and (sequence_parallel or not time.sequence_parallel)
            and (fused_loss or not time.fused_loss)
        ]
        return max(known, key=lambda time: (time.fused_loss, time.tp, time.sequence_parallel), default=None)

    def expert_times(self, layer: str) -> dict[int, LayerTime]:
        """What was measured with expert parallelism, by its degree."""
        return {time.ep: time for time in self.times if time.layer == layer and time.ep > 1}

    def memory_of(self, layer: str, tp: int, *, sequence_parallel: bool) -> LayerMemory | None:
        """What was measured of exactly this: what TP divides and what it does not only measurements at its degree
        tell."""
        known = (one for one in self.memory if (one.layer, one.tp) == (layer, tp))
        return next((one for one in known if one.sequence_parallel == sequence_parallel), None)
