"""From a model and a plan to one rank's share of it: the runtime's entry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision, schedule_named
from galvatron.families.build import build_meta, without_weights
from galvatron.families.generic.adapter import Loss
from galvatron.families.layer import Batch, CutModel, Tie
from galvatron.families.registry import cut as cut_model
from galvatron.families.rules import Columns, Vocabulary
from galvatron.families.saved import SavedWeights
from galvatron.families.weights import InitialWeights, ModelWeights, Weights
from galvatron.planner.plan.plan import Plan
from galvatron.processes.failures import report_failures
from galvatron.processes.world import cap_memory, join, own_device
from galvatron.runtime.assembly import Assembly, Settings, assemble
from galvatron.runtime.batches import LocalBatch, Reader
from galvatron.runtime.checks import check_model, check_schedule, check_world
from galvatron.runtime.data_parallel.units import LocalParameter
from galvatron.runtime.layout.groups import (
    GroupPool,
    StagePlan,
    backward_group,
    forward_group,
    needed_groups,
    tie_group,
)
from galvatron.runtime.layout.rows import Placements
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.pipeline.run import Neighbours, Pipeline
from galvatron.runtime.pipeline.transfer import Crossing, Side
from galvatron.runtime.tied.across_stages import Holding, TieExchange, holdings
from galvatron.runtime.whole import shapes_of

__all__ = ["parallelize"]

Model = nn.Module | PreTrainedConfig | Mapping[str, Any] | None


def parallelize(
    model: Model,
    plan: Plan,
    *,
    weights: str | Path | Weights | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    example: Batch | None = None,
    loss: Loss | None = None,
) -> ParallelModel:
    """This rank's share of a model under a plan. Call it on every rank, as under ``torchrun``.

    ``model``: a stock Hugging Face model (its weights are used, unless it is on the meta device), a configuration, or
    None for the one the plan was made for. ``weights``: a folder of safetensors to start from, or another source;
    without it, and without weights in ``model``, they are initialised from ``seed``, to the same values under any plan.
    ``dtype``: compute in this instead of the plan's precision. ``example`` and ``loss`` are for models of unknown
    family (see :func:`galvatron.families.registry.cut`). Raises :class:`galvatron.InvalidInput` before anything is
    allocated if model, plan and number of processes do not go together.
    """
    join()
    report_failures()
    check_world(plan, dist.get_world_size())
    check_schedule(plan)
    cut = cut_model(_stock(model, plan), example, loss)
    check_model(plan, cut)
    source = _weights(cut, model, weights, seed)
    where = torch.device(device) if device is not None else own_device()
    cap_memory(where, plan.memory_budget_bytes - plan.cluster.facts.reserved_bytes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    narrow = dtype or (torch.bfloat16 if plan.model.training.precision is Precision.BF16 else torch.float32)
    settings = Settings(device=where, dtype=narrow, master_dtype=wide, seed=seed)
    return _Builder(plan, cut, settings).build(source)


def _stock(model: Model, plan: Plan) -> nn.Module:
    if isinstance(model, nn.Module) and not any(buffer.is_meta for buffer in model.buffers()):
        empty: nn.Module = without_weights(model)  # so that nothing of the caller's model is kept alive
        return empty
    config: Any = plan.model.config if model is None else getattr(model, "config", model)
    if config is None:
        raise InvalidInput(
            f"plan: model {plan.model.name!r} was described by figures alone (model.config is null), so it cannot be "
            "built; give parallelize the model or its configuration"
        )
    return build_meta(config, plan.model.training, as_named=plan.model.family == "generic")


def _weights(cut: CutModel, model: Model, source: str | Path | Weights | None, seed: int) -> Weights:
    if isinstance(source, str | Path):
        return SavedWeights(cut, Path(source))
    if source is not None:
        return source
    if isinstance(model, nn.Module) and not any(parameter.is_meta for parameter in model.parameters()):
        return ModelWeights(cut, model)
    return InitialWeights(cut, seed)


class _Builder:
    """Puts the parts of one rank together."""

    def __init__(self, plan: Plan, cut: CutModel, settings: Settings) -> None:
        self.plan, self.cut, self.settings = plan, cut, settings
        self.rank = dist.get_rank()
        self.shapes = shapes_of(cut)  # before any layer is split
        self.schedule = schedule_named(plan.schedule)
        self.stages = tuple(
            StagePlan(ranks=stage.devices, first=stage.layers[0].index, strategies=stage.strategies)
            for stage in plan.stages
        )
        self.placements = [
            Placements([strategy.layout for strategy in stage.strategies], plan.micro_batch) for stage in self.stages
        ]
        self.pool = GroupPool(needed_groups(self.stages, plan.micro_batch, cut.ties, self.schedule), settings.device)
        self.number = next(number for number, stage in enumerate(self.stages) if self.rank in stage.ranks)

    @property
    def stage(self) -> StagePlan:
        return self.stages[self.number]

    def build(self, weights: Weights) -> ParallelModel:
        placements = self.placements[self.number]
        assembly = assemble(self.cut, self.stage, self.stages, placements, self.pool, self.rank, weights, self.settings)
        exchanges = self._exchanges(assembly)
        index = self.stage.ranks.index(self.rank)
        reader = Reader(
            self.cut,
            self._needs(),
            placements,
            index,
            micro_batches=self.plan.micro_batches,
            device=self.settings.device,
            dtype=self.settings.dtype,
        )

        def expect_backward(last: bool) -> None:
            for unit in assembly.units:
                unit.expect_backward(last=last)

        pipeline = Pipeline(
            stage=assembly.stage,
            neighbours=self._neighbours(),
            actions=self.schedule.actions(self.number, len(self.stages), self.plan.micro_batches),
            empty_inputs=self._empty_inputs,
            device=self.settings.device,
            dtype=self.settings.dtype,
            expect_backward=expect_backward,
        )
        last = self.stages[-1].strategies[-1]
        return ParallelModel(
            plan=self.plan,
            pipeline=pipeline,
            units=assembly.units,
            reader=reader,
            exchanges=exchanges,
            loss_replicas=len(self.stages[-1].ranks) // last.data_degree,
            shapes=self.shapes,
            device=self.settings.device,
            dtype=self.settings.master_dtype,
            seed=self.settings.seed,
        )

    def _needs(self) -> list[frozenset[str]]:
        placements = self.placements[self.number]
        needs: list[frozenset[str]] = [frozenset()] * len(placements.distinct)
        for index, placement in zip(self.stage.layers, placements.numbers, strict=True):
            needs[placement] |= self.cut.layers[index].inputs
        return needs

    def _empty_inputs(self, batch: LocalBatch) -> tuple[Tensor, ...]:
        form = self.stage.strategies[0].form
        rows = self.plan.micro_batch // self.stage.strategies[0].data_degree
        parts = form.parts // self.stage.strategies[0].data_degree
        shapes = self.cut.carried(self.stage.first, batch.shapes)
        return tuple(
            torch.empty((rows, shape[0] // parts, *shape[1:]), dtype=self.settings.dtype, device=self.settings.device)
            for shape in shapes
        )

    # Between stages

    def _neighbours(self) -> Neighbours:
        crossings: dict[str, Crossing] = {}
        for first in range(len(self.stages) - 1):
            if self.number not in (first, first + 1):
                continue
            here, there = self._side(first, -1), self._side(first + 1, 0)
            sending = self.number == first
            forward = self.pool.group(forward_group(self.stages, first))
            backward = self.pool.group(backward_group(self.stages, first, self.schedule))
            assert forward is not None
            assert backward is not None
            crossings["send_forward" if sending else "receive_forward"] = Crossing(here, there, self.rank, forward)
            crossings["receive_backward" if sending else "send_backward"] = Crossing(there, here, self.rank, backward)
        return Neighbours(**crossings)

    def _side(self, number: int, layer: int) -> Side:
        stage = self.stages[number]
        placement = self.placements[number].at[layer]
        return Side(ranks=stage.ranks, form=stage.strategies[layer].form, placement=placement)

    def _exchanges(self, assembly: Assembly) -> list[tuple[LocalParameter, TieExchange]]:
        """For each weight tied across stages of which this rank holds rows."""
        exchanges = []
        for number, tie in enumerate(self.cut.ties):
            stages = [stage for stage in self.stages if stage.uses(tie)]
            if tie.small or len(stages) == 1 or self.stage not in stages:
                continue
            group = self.pool.group(tie_group(stages))
            assert group is not None
            copies = [self._holdings(tie, stage) for stage in stages]
            exchanges.append((assembly.owners[number], TieExchange(copies, self.rank, group)))
        return exchanges

    def _holdings(self, tie: Tie, stage: StagePlan) -> list[Holding]:
        """Which rows of a stage's copy each of its ranks holds."""
        use = next(use for use in tie.uses if use.layer in stage.layers)
        layer = self.cut.layers[use.layer]
        path = use.name.rpartition(".")[0]
        splits = any(isinstance(rule, (Columns, Vocabulary)) and rule.path == path for rule in layer.rules)
        strategy = stage.strategies[use.layer - stage.first]
        owner = tie.uses[0]
        rows = self.shapes[self.cut.layers[owner.layer].stock_name(owner.name)][0]
        return holdings(stage.ranks, strategy, rows, splits=splits)
