"""Megatron's interleaved 1F1B, as a schedule to price: our runtime does not run it."""

from __future__ import annotations

from galvatron.core.spec.schedule import Action, Pass, Schedule

__all__ = ["interleaved"]


def interleaved(chunks: int) -> Schedule:
    """Each stage has so many chunks of layers (Narayanan et al. 2021, Section 2.2).

    Micro-batches go through in groups as large as the pipeline, chunk by chunk. Stage r of p runs
    2 · (p − r − 1) + (v − 1) · p chunks ahead, and the bubble is 1/v of that of 1F1B.
    """

    def ahead(stage: int, stages: int, micro_batches: int) -> int:
        return min(micro_batches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages)

    def holds(stage: int, stages: int, micro_batches: int) -> int:
        return -(-min(micro_batches * chunks, ahead(stage, stages, micro_batches) + 1) // chunks)

    def order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        def action(kind: Pass, number: int) -> Action:
            group, place = divmod(number, stages * chunks)
            chunk, within = divmod(place, stages)
            return Action(kind, group * stages + within, chunk if kind is Pass.FORWARD else chunks - 1 - chunk)

        total, first = micro_batches * chunks, ahead(stage, stages, micro_batches)
        actions = [action(Pass.FORWARD, number) for number in range(first)]
        for number in range(total):
            if first + number < total:
                actions.append(action(Pass.FORWARD, first + number))
            actions.append(action(Pass.BACKWARD, number))
        return tuple(actions)

    def allows(stages: int, micro_batches: int) -> bool:
        return micro_batches % stages == 0

    return Schedule(
        name=f"interleaved-{chunks}",
        title=f"interleaved 1F1B with {chunks} chunks a stage",
        help="1F1B in which each stage has several chunks of layers: a smaller bubble, more transfers",
        order=order,
        holds=holds,
        allows=allows,
        both_ways_at_once=True,
        chunks=chunks,
        bubble=1 / chunks,
    )
