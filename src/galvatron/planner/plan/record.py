"""What a plan holds: the fields of the file, one dataclass for each of its objects (docs/plan-format.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from galvatron.core.spec import SWITCHES, Cluster, LayerSpec, ModelProfile, ModelSpec, Strategy, Switches, Training
from galvatron.core.spec.limits import Limits

__all__ = [
    "FORMAT_VERSION",
    "Certificate",
    "ClusterFacts",
    "LayerRun",
    "MemoryUse",
    "ModelFacts",
    "PlanRecord",
    "PlannedLayer",
    "PlannedStage",
    "SpaceFacts",
    "TimeUse",
    "layer_runs",
]

FORMAT_VERSION = 8

_LATER_SWITCHES = (
    "selective_recompute", "recompute_but_attention", "offload", "float8", "zero3",
    "context_parallel", "context_orders",
)  # fmt: skip
"""Left out of files of plans that were searched without them, which stay as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """Consecutive equal layers."""

    layer: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The model a plan is for: kinds of layer, and their order in runs."""

    name: str
    family: str
    digest: str
    parameters: int
    training: Training
    kinds: tuple[LayerSpec, ...]
    order: tuple[LayerRun, ...]
    config: dict[str, Any] | None = field(hash=False)
    """The Hugging Face configuration that builds the model; None for a model described by figures alone."""

    @classmethod
    def of(cls, model: ModelSpec) -> ModelFacts:
        runs = groupby(layer.name for layer in model.layers)
        return cls(
            name=model.name,
            family=model.family,
            digest=model.digest,
            parameters=model.parameters,
            training=model.training,
            kinds=model.kinds,
            order=tuple(LayerRun(layer=name, count=len(list(run))) for name, run in runs),
            config=None if model.config is None else dict(model.config),
        )

    def spec(self) -> ModelSpec:
        kinds = {kind.name: kind for kind in self.kinds}
        layers = tuple(kinds[run.layer] for run in self.order for _ in range(run.count))
        return ModelSpec(name=self.name, family=self.family, layers=layers, training=self.training, config=self.config)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """The cluster a plan is for."""

    digest: str
    devices: int
    facts: Cluster


@dataclass(frozen=True, kw_only=True)
class _SpaceName:
    name: str


@dataclass(frozen=True, kw_only=True)
class SpaceFacts(Switches, _SpaceName):
    """What was searched, and by which rules. In the file: the name, each switch, and the rest (bases go backwards)."""

    cuts: str
    conventions: str
    batches: tuple[int, ...]
    """Batch sizes considered."""
    max_micro_batches: int | None
    stages_a_micro_batch: int | None = None
    """Deep pipelines may have one micro-batch for so many stages; only plans where that is more than the limit have
    it."""
    limits: Limits | None = None
    """What else was ruled out; only plans made within limits have it."""

    @property
    def switches(self) -> Switches:
        return Switches(**{switch.name: getattr(self, switch.name) for switch in SWITCHES})


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeUse:
    """Where a stage's time goes. Seconds for one micro-batch; communication is the exposed part."""

    compute_s: float
    tp_s: float
    sdp_s: float
    layout_s: float
    """Slice-Gather between layers."""
    transfer_s: float
    """Receiving from the neighbouring stages."""
    sync_s: float
    """Gradient synchronisation, once an iteration."""
    optimizer_s: float
    """Optimizer step, once an iteration."""
    ep_s: float = 0.0
    """Tokens on their way to experts with axes of their own, and back; only plans of models with experts have it."""
    cp_s: float = 0.0
    """Exchanges of attention over divided sequences; only plans that were searched with these have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes at a stage's peak."""

    states: int
    activations: int
    transient: int
    reserved: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayer:
    """One layer and its strategy."""

    index: int
    """Position in the model, from 0."""
    layer: str
    strategy: str
    """Axes outermost first, with flags: "dp2-tp4+rc" (see docs/plan-format.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """Consecutive layers on one group of devices."""

    devices: tuple[int, ...]
    layers: tuple[PlannedLayer, ...]
    time_s: float
    """Mean time of a micro-batch, its share of once-an-iteration work included."""
    time: TimeUse
    in_flight: int
    """Micro-batches whose activations are alive at the peak."""
    memory_bytes: int
    """Predicted peak, everything included: never above the budget."""
    memory: MemoryUse

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(Strategy.parse(layer.strategy) for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The proof that no plan in the space is better under the cost model, or by how much one may be."""

    lower_bound_s: float
    """No plan at this batch takes less, and none at another batch has a higher throughput."""
    gap: float
    """Relative distance between the plan and the bound: 0 where the search went on until they met, more where it was
    stopped before."""
    combinations: int
    opened: int
    solved: int
    stages_solved: int

    @property
    def proven(self) -> str:
        """What is proven, in words."""
        if self.gap == 0:
            return "proven optimal"
        near = f"within {self.gap:.2%} of the best plan" if self.gap < 1 else "it may be far from the best plan"
        return f"not proven optimal: {near}"


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """All fields of a plan, in the order of the file."""

    version: int
    model: ModelFacts
    cluster: ClusterFacts
    profile: ModelProfile | None
    space: SpaceFacts
    memory_budget_bytes: int
    schedule: str
    batch: int
    micro_batches: int
    throughput: float
    """Samples a second."""
    iteration_s: float
    bubble_s: float
    """Time the slowest stage waits for the others while the pipeline fills and drains."""
    stages: tuple[PlannedStage, ...]
    certificate: Certificate | None
    """None: the plan was written by hand, so nothing is proven about it."""

    @property
    def pipeline_degree(self) -> int:
        return len(self.stages)

    @property
    def micro_batch(self) -> int:
        return self.batch // self.micro_batches

    @cached_property
    def memory_bytes(self) -> int:
        """Peak of the fullest stage."""
        return max(stage.memory_bytes for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """As the file has it. What only models with experts have is left out for others, whose files stay as they
        were before there were experts."""
        facts = asdict(self)
        if self.profile is not None:
            facts["profile"] = self.profile.to_dict()
        facts["model"]["training"] = self.model.training.to_dict()
        facts["model"]["kinds"] = tuple(kind.to_dict() for kind in self.model.kinds)
        facts["cluster"]["facts"] = self.cluster.facts.to_dict()
        for name in _LATER_SWITCHES:
            if not facts["space"][name]:
                del facts["space"][name]
        for name in ("limits", "stages_a_micro_batch"):
            if facts["space"][name] is None:
                del facts["space"][name]
        if all(kind.experts is None for kind in self.model.kinds):
            del facts["space"]["expert_parallel"]
            for stage in facts["stages"]:
                del stage["time"]["ep_s"]
        if not self.space.context_parallel:
            for stage in facts["stages"]:
                del stage["time"]["cp_s"]
        return facts


def layer_runs(layers: Sequence[PlannedLayer]) -> list[tuple[PlannedLayer, int]]:
    """Consecutive layers of one kind and strategy, with their number."""
    runs = groupby(layers, key=lambda layer: (layer.layer, layer.strategy))
    grouped = [list(run) for _, run in runs]
    return [(run[0], len(run)) for run in grouped]
