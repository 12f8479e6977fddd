"""What the paper's own runs held in memory beyond what a model's operations explain (docs/paper-profile.md).

Applies to models trained with ``Attention.PAPER`` only. Each figure was read from the paper's Table 1 or fitted to the
out-of-memory cells and batch sizes of its main table; none belongs to one model or budget.
"""

from __future__ import annotations

from dataclasses import replace

from galvatron.spec.model import Attention, LayerSpec, ModelSpec, TensorParallel

__all__ = ["as_in_paper"]

_BLOCK_TRANSIENT = 0.9
"""Working set of a block's backward over what the block saves (fitted): each saved tensor has its gradient alive at
some time, and the caching allocator of 2022 keeps most of those blocks."""


def as_in_paper(model: ModelSpec) -> ModelSpec:
    """The model with the layers of the paper's runs, where it is trained as there; else unchanged."""
    if model.training.attention is not Attention.PAPER:
        return model
    kinds = {kind.name: _layer(kind, model.family) for kind in model.kinds}
    return replace(model, layers=tuple(kinds[layer.name] for layer in model.layers))


def _layer(layer: LayerSpec, family: str) -> LayerSpec:
    tensor = layer.tensor_parallel
    if tensor is not None and tensor.divides:  # a block: it has attention heads
        if family == "swin":
            # Table 1 shows half a boundary tensor more a block (18.14 MiB for stage 3) than the operations save.
            layer = replace(layer, split_activation_bytes=layer.split_activation_bytes + layer.boundary_bytes // 2)
        return replace(layer, transient_bytes=int(_BLOCK_TRANSIENT * layer.activation_bytes))
    if family == "swin" and layer.name.startswith("merge"):
        return _split_merge(layer)
    return layer


def _split_merge(layer: LayerSpec) -> LayerSpec:
    """Patch merging with its reduction split by rows: pure TP fits the paper's batch sizes only so.

    Saved are the norm's input, whole on every rank, and of the same size its output, which is split. The all-reduce of
    the result is matched in backward by gathering the norm's gradient, twice as large but half the volume a byte.
    """
    half = layer.activation_bytes // 2
    norm = 4 * layer.boundary_bytes // layer.boundary_bytes  # weight and bias over four joined patches, see below
    return replace(
        layer,
        replicated_parameters=norm,
        split_activation_bytes=half,
        replicated_activation_bytes=layer.activation_bytes - half,
        tensor_parallel=TensorParallel(
            forward_collectives=1, backward_collectives=1, message_bytes=layer.boundary_bytes
        ),
    )
