"""Puts the parts of one rank together: its stage, its batches, its neighbours in the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch.distributed as dist

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Kind, degree_of, schedule_named
from galvatron.families.layer import LayeredModel, Tie
from galvatron.families.rules import Columns, Vocabulary
from galvatron.families.weights import Weights
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.assembly import Assembly, RankStage, assemble, sums_rows
from galvatron.runtime.batches import LocalBatch, Reader
from galvatron.runtime.buffers import Buffers
from galvatron.runtime.data_parallel.units import LocalParameter
from galvatron.runtime.layout.groups import (
    GroupPool,
    Position,
    StagePlan,
    backward_group,
    forward_group,
    needed_groups,
    tie_group,
)
from galvatron.runtime.layout.portions import Portion, Portions
from galvatron.runtime.layout.tokens import check_length
from galvatron.runtime.model import ParallelModel, RankParts
from galvatron.runtime.pipeline.run import Borders, Neighbours, Pipeline
from galvatron.runtime.pipeline.transfer import StageEnd, StageTransfer
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.tied.across_stages import Holding, TieExchange, holdings
from galvatron.runtime.whole import shapes_of

__all__ = ["build"]


def build(plan: Plan, layered: LayeredModel, settings: ComputeSettings, weights: Weights) -> ParallelModel:
    """This rank's share of a model under a plan that was checked to go with it."""
    return _Builder(plan, layered, settings).build(weights)


_MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask")


def _check_masks(samples: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Refuse masks of each head where heads are divided."""
    for name, shape in samples.items():
        if name in _MASKS and len(shape) == 3 and shape[0] > 1:  # heads, queries, keys
            raise InvalidInput(
                f"batch: {name!r} has a mask for each of {shape[0]} heads, which {what} divides over ranks; give one "
                "mask for all heads, or a plan without TP"
            )


class _Builder:
    """Puts the parts of one rank together."""

    def __init__(self, plan: Plan, layered: LayeredModel, settings: ComputeSettings) -> None:
        self.plan, self.layered, self.settings = plan, layered, settings
        self.rank = dist.get_rank()
        self.shapes = shapes_of(layered)  # before any layer is split
        self.schedule = schedule_named(plan.schedule)
        self.stages = tuple(
            StagePlan(ranks=stage.devices, first=stage.layers[0].index, strategies=stage.strategies)
            for stage in plan.stages
        )
        self.portions = [Portions(stage.strategies, plan.micro_batch) for stage in self.stages]
        self.pool = GroupPool(
            needed_groups(self.stages, plan.micro_batch, layered.ties, self.schedule, sums_rows=sums_rows(layered)),
            settings.device,
        )
        self.number = next(number for number, stage in enumerate(self.stages) if self.rank in stage.ranks)

    @property
    def stage(self) -> StagePlan:
        return self.stages[self.number]

    def build(self, weights: Weights) -> ParallelModel:
        portions = self.portions[self.number]
        mine = RankStage(plan=self.stage, stages=self.stages, portions=portions, rank=self.rank, turns=self._turns)
        assembly = assemble(self.layered, mine, self.pool, weights, self.settings)
        exchanges = self._exchanges(assembly)
        index = self.stage.ranks.index(self.rank)
        reader = Reader(
            self.layered,
            self._needs(),
            portions,
            index,
            micro_batches=self.plan.micro_batches,
            settings=self.settings,
        )
        reader.context_groups = self._context_groups
        strategies = [strategy for stage in self.stages for strategy in stage.strategies]
        if any(strategy.layout.sequence or strategy.degree(Kind.TP) > 1 for strategy in strategies):
            reader.check_shapes = cache(self._check_shapes)

        def expect_backward(last: bool) -> None:
            for unit in assembly.units:
                unit.expect_backward(last=last)

        pipeline = Pipeline(
            stage=assembly.stage,
            neighbours=self._neighbours(),
            actions=self.schedule.actions(self.number, len(self.stages), self.plan.micro_batches),
            input_shapes=self._input_shapes,
            device=self.settings.device,
            expect_backward=expect_backward,
            borders=Borders(before=self.layered.first_trained < self.stage.first),
        )
        last = self.stages[-1].strategies[-1]
        parts = RankParts(
            pipeline=pipeline,
            units=tuple(assembly.units),
            reader=reader,
            exchanges=tuple(exchanges),
            loss_replicas=len(self.stages[-1].ranks) // degree_of(last.gradient_factors),
            shapes=self.shapes,
            buffers=Buffers(self.layered, assembly.stage.layers),
        )
        return ParallelModel(self.plan, parts, self.settings)

    @property
    def _turns(self) -> bool:
        """Whether each forward on this rank is followed by its own backward."""
        actions = self.schedule.actions(self.number, len(self.stages), self.plan.micro_batches)
        pairs = zip(actions[::2], actions[1::2], strict=False)
        return all(first.micro_batch == second.micro_batch for first, second in pairs)

    def _needs(self) -> list[frozenset[str]]:
        portions = self.portions[self.number]
        needs: list[frozenset[str]] = [frozenset()] * len(portions.distinct)
        for index, portion in zip(self.stage.layers, portions.numbers, strict=True):
            needs[portion] |= self.layered.layers[index].inputs
        return needs

    def _context_groups(self, portion: Portion) -> tuple[str, str]:
        assert portion.context is not None
        return self.pool.context_names(Position(self.stage.ranks, self.rank), portion.context)

    def _check_shapes(self, samples: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        """Every rank finds out before any of them sends, because messages of other lengths would end the process."""
        for stage in self.stages:
            for index, strategy in zip(stage.layers, stage.strategies, strict=True):
                if strategy.degree(Kind.TP) > 1:
                    masks = {name: shape for name, shape in samples if name in self.layered.layers[index].inputs}
                    _check_masks(masks, f"{str(strategy)!r} of layer {index}")
                if strategy.layout.sequence:
                    for shape in self.layered.carried(index, dict(samples)):
                        check_length(strategy.layout, shape[0], f"{str(strategy)!r} of layer {index}")

    def _input_shapes(self, batch: LocalBatch) -> list[tuple[int, ...]]:
        layout = self.stage.strategies[0].layout
        rows = self.plan.micro_batch // self.stage.strategies[0].data_degree
        parts = layout.parts // self.stage.strategies[0].data_degree
        shapes = self.layered.carried(self.stage.first, batch.shapes)
        return [(rows, shape[0] // parts, *shape[1:]) for shape in shapes]

    # Between stages

    def _neighbours(self) -> Neighbours:
        transfers: dict[str, StageTransfer] = {}
        for first in range(len(self.stages) - 1):
            if self.number not in (first, first + 1):
                continue
            here, there = self._end(first, -1), self._end(first + 1, 0)
            sending = self.number == first
            forward = self.pool.group(forward_group(self.stages, first))
            backward = self.pool.group(backward_group(self.stages, first, self.schedule))
            assert forward is not None
            assert backward is not None
            transfers["send_forward" if sending else "receive_forward"] = StageTransfer(here, there, self.rank, forward)
            transfers["receive_backward" if sending else "send_backward"] = StageTransfer(
                there, here, self.rank, backward
            )
        return Neighbours(**transfers)

    def _end(self, number: int, layer: int) -> StageEnd:
        stage = self.stages[number]
        assignment = self.portions[number].assignments.at[layer]
        return StageEnd(ranks=stage.ranks, layout=stage.strategies[layer].layout, assignment=assignment)

    def _exchanges(self, assembly: Assembly) -> list[tuple[LocalParameter, TieExchange]]:
        """For each weight tied across stages of which this rank holds rows."""
        exchanges = []
        for number, tie in enumerate(self.layered.ties):
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
        layer = self.layered.layers[use.layer]
        path = use.name.rpartition(".")[0]
        splits = any(isinstance(rule, (Columns, Vocabulary)) and rule.path == path for rule in layer.rules)
        strategy = stage.strategies[use.layer - stage.first]
        owner = tie.uses[0]
        rows = self.shapes[self.layered.layers[owner.layer].stock_name(owner.name)][0]
        return holdings(stage.ranks, strategy, rows, splits=splits)
