"""What some kinds of layer have and others do not, as columns: a loss that can be fused, results that can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import GRADIENT_BYTES, Cluster, Context, FusedLoss, Kept, LayerSpec, ModelProfile, ModelSpec
from galvatron.core.spec.tuning import stock_kind
from galvatron.planner.cost.communication import Floats

__all__ = ["ContextColumns", "GradeColumns", "LossColumns", "context_columns", "grade_columns", "loss_columns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossColumns:
    """What each kind of layer has whose loss can be fused; zero for others."""

    logits: Floats
    saved_bytes: Floats
    parameters: Floats
    words: Floats
    """Of a vocabulary that is filled up where its rows are not aligned: on GPUs."""
    gradient_bytes: Floats
    """Of the projection's weight, as it is kept."""
    compiled: NDArray[np.bool_]
    """Whether a chunk's loss is one kernel, where its vocabulary is whole."""
    chunk_s: Floats
    """Reading and writing the sum of that gradient once, in fp32; zero where a profile has it in its times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeColumns:
    """What each kind of layer keeps beside its input where some results are kept, and its cost; zero for others."""

    split_bytes: Floats
    replicated_bytes: Floats
    sent_bytes: Floats
    measured_bytes: Floats
    """With the input, on one device without TP; not a number where it was not measured."""
    share: Floats
    """Of forward, for each sample: of its operations, or of its time as measured."""
    fixed_s: Floats
    """However few the samples; not a number where it was not measured."""
    traffic: Floats
    """Bytes that recomputing moves through memory for each byte that was not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextColumns:
    """What attention of each kind of layer exchanges where its sequences are divided; zero for others."""

    share: Floats
    """Of the layer's operations, those of attention itself."""
    query_bytes: Floats
    key_value_bytes: Floats
    causal: NDArray[np.bool_]


def context_columns(kinds: Sequence[LayerSpec]) -> ContextColumns:
    """Of the kinds of layer whose sequences can be divided."""
    facts = [kind.context or Context(length=1) for kind in kinds]  # of which no column holds the length

    def column(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)[:, None]

    return ContextColumns(
        share=column(
            [own.attention_flops / max(kind.forward_flops, 1) for kind, own in zip(kinds, facts, strict=True)]
        ),
        query_bytes=column([own.query_bytes for own in facts]),
        key_value_bytes=column([own.key_value_bytes for own in facts]),
        causal=np.array([[own.causal] for own in facts]),
    )


def loss_columns(model: ModelSpec, cluster: Cluster, profile: ModelProfile | None) -> LossColumns:
    """Of the kinds of layer whose loss can be fused."""
    measured = {time.layer for time in profile.times if time.fused_loss} if profile else set()
    counted = np.array([[kind.name not in measured] for kind in model.kinds])
    facts = [kind.fused_loss or FusedLoss(logits=0, saved_bytes=0, parameters=0) for kind in model.kinds]
    parameters = np.array([[own.parameters] for own in facts], dtype=np.float64)
    return LossColumns(
        logits=np.array([[own.logits] for own in facts], dtype=np.float64),
        saved_bytes=np.array([[own.saved_bytes] for own in facts], dtype=np.float64),
        parameters=parameters,
        words=np.array([[own.words if cluster.fragmentation else 0] for own in facts], dtype=np.float64),
        gradient_bytes=parameters * model.training.precision.bytes,
        compiled=np.full(parameters.shape, model.training.compile),
        chunk_s=counted * 2 * GRADIENT_BYTES * parameters / cluster.device.memory_bytes_per_s,
    )


def grade_columns(
    kinds: Sequence[LayerSpec], facts: Sequence[Kept | None], profile: ModelProfile | None, grade: str, traffic: float
) -> GradeColumns:
    """Of the kinds of layer that can keep some results: counted, or as a profile measured them."""
    kept = [own or Kept(split_bytes=0, flops=0) for own in facts]
    names = [stock_kind(kind.name) if kind.tuning else kind.name for kind in kinds]
    measured = [profile.grade_of(name, grade) if profile else None for name in names]

    def column(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)[:, None]

    counted = [own.flops / max(kind.forward_flops, 1) for kind, own in zip(kinds, kept, strict=True)]
    return GradeColumns(
        split_bytes=column([own.split_bytes for own in kept]),
        replicated_bytes=column([own.replicated_bytes for own in kept]),
        sent_bytes=column([own.sent_bytes for own in kept]),
        measured_bytes=column([own.activation_bytes if own else np.nan for own in measured]),
        share=column([own.share if own else share for own, share in zip(measured, counted, strict=True)]),
        fixed_s=column([own.fixed_s if own else np.nan for own in measured]),
        traffic=column([traffic] * len(kept)),
    )
