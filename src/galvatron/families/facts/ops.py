"""The operations a Transformer layer is made of, as autograd sees them: parameters, work, saved bytes, gradients.

An :class:`Op` states what one sample costs it. What it *saves* are the tensors its backward needs, each counted by the
one operation that frees it last, so that a tensor shared by two (a norm's output that feeds three projections) counts
once. The tallies are those of stock Hugging Face modules on CUDA, where a dropout mask takes one byte an element and
norm statistics are fp32. Where blocks are compiled, what is cheap to compute again from what is kept is not kept
(:mod:`galvatron.measure.partition` asks PyTorch). Knows precision and that, and nothing else about training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from galvatron.core.spec.model import Kept, LayerSpec, TensorParallel

__all__ = [
    "ACTIVATIONS",
    "FP32",
    "ID_BYTES",
    "Op",
    "Split",
    "activation",
    "compiled_activation",
    "dropout",
    "layer",
    "layer_norm",
    "linear",
    "residual",
]

_LEAST_PRODUCTS = 2
"""With fewer (a head, a merge of patches) recompute in part would keep next to everything."""
FP32 = 4
"""Bytes of a statistic, a log-sum-exp or a loss, whatever the precision of training."""
ID_BYTES = 8
"""Bytes of a token id."""

ACTIVATIONS = {"relu": 0, "gelu": 1, "gelu_pytorch_tanh": 1, "silu": 1, "swish": 1, "tanh": 0, "gelu_new": 4}
"""Tensors of its input's size an activation keeps besides its output (which the next product keeps). ReLU and tanh
need the output alone. ``gelu_new`` is written out in Python, so each step of it keeps its operands: x (for x³), x/2,
tanh(…) and 1 + tanh(…)."""


class Split(Enum):
    """Megatron's ways to split a linear layer over tensor-parallel ranks."""

    COLUMNS = auto()
    """Each rank computes some outputs from the whole input: the input is replicated, the output split."""
    ROWS = auto()
    """Each rank sums over some inputs: the input is split, the output whole after an all-reduce, the bias whole."""
    WHOLE = auto()
    """Every rank does all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation for one sample."""

    parameters: int = 0
    replicated_parameters: int = 0
    """Of the parameters, those every tensor-parallel rank holds."""
    tied_parameters: int = 0
    """Of the parameters, those that belong to an earlier layer."""
    flops: int = 0
    replicated_flops: int = 0
    """Of these, those every tensor-parallel rank does."""
    split: int = 0
    """Bytes saved until its backward, divided by tensor parallelism."""
    replicated: int = 0
    """Bytes saved until its backward, whole on every tensor-parallel rank."""
    gradient: int = 0
    """Bytes its backward hands on: the gradient of its inputs."""
    scratch: int = 0
    """Bytes its backward allocates and frees again."""
    result: int = 0
    """Bytes of its result where selective recompute keeps that: of products with weights, and of fused attention."""
    result_split: bool = False
    """Whether tensor parallelism divides it."""
    reduced: bool = False
    """Whether tensor-parallel ranks sum it up."""
    attends: bool = False
    """Fused attention."""
    held: int = 0
    """Bytes of other gradients that wait while its backward runs (the skip connection's, say)."""


def linear(tokens: int, fan_in: int, fan_out: int, split: Split, *, element: int, bias: bool) -> Op:
    """A linear layer: saves its input for the weight's gradient."""
    weight, inputs = fan_in * fan_out, tokens * fan_in * element
    whole = 0
    if split is Split.WHOLE:
        whole = weight + fan_out * bias
    elif split is Split.ROWS:
        whole = fan_out * bias
    return Op(
        parameters=weight + fan_out * bias,
        replicated_parameters=whole,
        flops=2 * tokens * weight,
        replicated_flops=2 * tokens * weight if split is Split.WHOLE else 0,
        split=inputs if split is Split.ROWS else 0,
        replicated=0 if split is Split.ROWS else inputs,
        gradient=inputs,
        result=tokens * fan_out * element,
        result_split=split is Split.COLUMNS,
        reduced=split is Split.ROWS,
    )


def layer_norm(tokens: int, hidden: int, *, element: int) -> Op:
    """LayerNorm with weight and bias: saves its input, and mean and deviation of each token."""
    return Op(
        parameters=2 * hidden,
        replicated_parameters=2 * hidden,
        replicated=tokens * hidden * element + 2 * tokens * FP32,
        gradient=tokens * hidden * element,
    )


def dropout(elements: int, *, active: bool, element: int, split: bool = False) -> tuple[Op, ...]:
    """Dropout: a mask of one byte an element; nothing at all where it is off."""
    if not active:
        return ()
    return (Op(split=elements * split, replicated=elements * (not split), gradient=elements * element),)


def activation(name: str, elements: int, *, element: int, output_kept: bool, split: bool = True) -> Op:
    """An element-wise non-linearity.

    ``output_kept``: whether the next operation keeps the output anyway. Where a dropout comes between, it does not, and
    the activations whose backward reads their own output keep it themselves.
    """
    keeps = ACTIVATIONS[name]
    if keeps == 0 and not output_kept:
        keeps = 1
    saved = keeps * elements * element
    # Written-out activations have two branches of gradients alive at once.
    gradient = elements * element * (2 if keeps > 1 else 1)
    return Op(split=saved if split else 0, replicated=0 if split else saved, gradient=gradient)


def compiled_activation(name: str, elements: int, *, element: int, output_kept: bool, gated: bool) -> Op:
    """The same in a compiled block: it keeps its input, or of a ReLU whether that was positive, a byte. Beside a gate
    all keep their input, which the other factor's gradient needs."""
    saved = elements * element
    if not gated:
        saved = {"relu": elements, "tanh": 0 if output_kept else saved}.get(name, saved)
    return Op(split=saved, gradient=elements * element)


def residual(ops: Iterable[Op], skip: int) -> tuple[Op, ...]:
    """A branch beside a skip connection: the gradient of ``skip`` bytes waits while all but its last op go backward."""
    *inner, last = ops
    return (*(replace(op, held=op.held + skip) for op in inner), last)


def layer(
    name: str, ops: Iterable[Op], *, boundary: int, tensor_parallel: TensorParallel | None, incoming: int | None = None
) -> LayerSpec:
    """Sum operations up to a layer; ``incoming`` is the gradient its backward starts from (None: of its boundary).

    The transient is found by walking backward: at each operation the gradient coming in, those it makes and those that
    wait are alive, while what the later operations had saved is already free. The largest excess over everything saved
    is what backward needs on top. (Weight gradients are states, and the buffers of reductions are bounded whatever the
    batch: neither is part of it.) A layer that cannot be split holds all it has on every rank.
    """
    ops = tuple(ops)
    transient, freed, alive = 0, 0, boundary if incoming is None else incoming
    for op in reversed(ops):
        transient = max(transient, alive + op.gradient + op.scratch + op.held - freed)
        freed += op.split + op.replicated
        alive = op.gradient
    parameters = sum(op.parameters for op in ops)
    split, replicated = sum(op.split for op in ops), sum(op.replicated for op in ops)
    whole = tensor_parallel is None
    return LayerSpec(
        name=name,
        parameters=parameters,
        replicated_parameters=parameters if whole else sum(op.replicated_parameters for op in ops),
        tied_parameters=sum(op.tied_parameters for op in ops),
        forward_flops=sum(op.flops for op in ops),
        replicated_flops=0 if whole else sum(op.replicated_flops for op in ops),
        split_activation_bytes=0 if whole else split,
        replicated_activation_bytes=replicated + split if whole else replicated,
        boundary_bytes=boundary,
        transient_bytes=transient,
        tensor_parallel=tensor_parallel,
        selective=_kept(ops, whole=whole, products=True),
        but_attention=_kept(ops, whole=whole, products=False),
    )


def _kept(ops: tuple[Op, ...], *, whole: bool, products: bool) -> Kept | None:
    """What stays where all is recomputed but products and attention, or but attention; None where it is next to
    nothing. What follows the last operation that saves anything is not run again, and its results are not kept.

    ``whole``: tensor parallelism does not split the layer.
    """
    last = max((place for place, op in enumerate(ops) if op.split + op.replicated), default=0)
    again = ops[:last]
    kept = [op for op in again if op.result and (op.attends or products)]
    if len(kept) < (_LEAST_PRODUCTS if products else 1):
        return None
    split = sum(op.result for op in kept if op.result_split and not whole)
    return Kept(
        split_bytes=split,
        replicated_bytes=sum(op.result for op in kept) - split,
        sent_bytes=0 if whole or products else sum(op.result for op in again if op.reduced),
        flops=sum(op.flops for op in again if op not in kept),
    )
