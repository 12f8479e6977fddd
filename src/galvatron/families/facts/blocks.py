"""The parts of Transformer layers: attention, feed-forward, norms, and the heads that end a model.

Units used in the comments, per sample: u = tokens · hidden · bytes, w = heads · queries · keys · bytes (one attention
map). In them an eager BERT or ViT block saves 16u + 1w: input 1u, q, k, v 3u, context 1u, two norms 2u + 1u (norm
output), feed-forward 4u + 4u, probabilities 1w; dropout adds 0.5u and 1.25w in fp32 (two masks of a byte an element on
the residual, one on the map, and the dropped map). 4u of these (block input, norm inputs and outputs) are replicated
under tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import (
    DEFAULT_LONGEST,
    Attention,
    Context,
    FusedLoss,
    LayerSpec,
    Precision,
    TensorParallel,
    Training,
)
from galvatron.families.facts.ops import (
    FP32,
    Op,
    Split,
    activation,
    compiled_activation,
    dropout,
    layer,
    layer_norm,
    linear,
)

__all__ = [
    "AttentionShape",
    "FeedForwardShape",
    "HeadShape",
    "RmsNorm",
    "attention",
    "class_head",
    "collectives",
    "context_of",
    "divided_by_tokens",
    "dropout_active",
    "feed_forward",
    "language_head",
    "paper_block",
    "refuse_sequence_length",
    "rms_norm",
    "rotates_by_length",
    "token_count",
]

_PAPER_LOGIT_MAPS = 5.5
"""Working set of the head in the paper's runs, in fp32 tensors of tokens × vocabulary on top of the two it saves
(fitted, docs/paper-profile.md)."""
_PAPER_BLOCK_SHARE = 0.9
"""Working set of a block's backward in the paper's runs, over what the block saves (fitted, docs/paper-profile.md)."""


def dropout_active(training: Training, probability: float) -> bool:
    """Whether a dropout of this probability in the model's configuration takes place."""
    return probability > 0 if training.dropout is None else training.dropout


def collectives(
    message: int,
    *,
    forward: int,
    backward: int,
    divides: tuple[int, ...] = (),
    sequence_divides: tuple[int, ...] = (),
) -> TensorParallel:
    """Tensor parallelism with the given all-reduces of one message size."""
    return TensorParallel(
        divides=divides,
        forward_collectives=forward,
        backward_collectives=backward,
        message_bytes=message,
        sequence_divides=sequence_divides,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One attention: its sizes, and what its implementation in Hugging Face does."""

    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    queries: int
    """Tokens that ask."""
    keys: int
    """Tokens that are asked. Those of another stack (cross-attention) are saved there, where they are made."""
    span: int
    """Keys each query sees: all of them, or those of its window."""
    bias: bool
    """Whether the query, key and value projections have biases."""
    output_bias: bool
    causal: bool = False
    dropout: bool = False
    """On the probabilities."""
    fp32_softmax: bool = False
    """Eager softmax computed in fp32 and cast back: in bf16 both results are saved."""
    fused_bias_bytes: int = 0
    """A learned additive bias map that a fused kernel has to be handed, and keeps."""
    table: int = 0
    """Parameters of a relative position table, split by heads."""


def attention(shape: AttentionShape, training: Training) -> tuple[Op, ...]:
    """Projections, scores, softmax, weighted sum, output projection: everything between a norm and a residual sum."""
    element = training.precision.bytes
    inner, kv_inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kv_tokens = 2 * shape.keys
    weight = shape.hidden * (inner + 2 * kv_inner)
    inputs = shape.queries * shape.hidden * element
    projections = Op(
        parameters=weight + (inner + 2 * kv_inner) * shape.bias + shape.table,
        flops=2 * shape.hidden * (shape.queries * inner + kv_tokens * kv_inner),
        replicated=inputs,
        # Each projection makes a gradient of the same input; they are summed in pairs.
        gradient=2 * inputs,
        result=(shape.queries * inner + kv_tokens * kv_inner) * element,
        result_split=True,
    )
    output = linear(shape.queries, inner, shape.hidden, Split.ROWS, element=element, bias=shape.output_bias)
    core = _fused_core(shape, element) if _is_fused(shape, training) else _eager_core(shape, training)
    return (projections, *core, output)


def context_of(shape: AttentionShape, training: Training) -> Context:
    """How sequences of a layer with this one attention can be divided over devices."""
    element = training.precision.bytes
    flops = 4 * shape.queries * shape.span * shape.heads * shape.head_dim
    return Context(
        length=shape.queries,
        heads=shape.heads,
        key_value_heads=shape.kv_heads,
        causal=shape.causal,
        ring=not shape.dropout,
        attention_flops=flops // 2 if shape.causal and _is_fused(shape, training) else flops,
        query_bytes=shape.queries * shape.heads * shape.head_dim * element,
        key_value_bytes=2 * shape.keys * shape.kv_heads * shape.head_dim * element,
    )


def rotates_by_length(rope_type: str) -> bool:
    """Whether rotary frequencies depend on the longest position that a model is given: a rank that has a part of each
    sequence would take others."""
    return "dynamic" in rope_type or rope_type == "longrope"


def divided_by_tokens(layer: LayerSpec, tokens: int) -> LayerSpec:
    """A layer that treats each token for itself, so that devices can have some each."""
    return replace(layer, context=Context(length=tokens))


def _is_fused(shape: AttentionShape, training: Training) -> bool:
    # No fused kernel of CUDA takes grouped heads in fp32: PyTorch falls back to maps, and saves what eager saves.
    grouped = shape.kv_heads != shape.heads
    return training.attention is Attention.FUSED and not (grouped and training.precision is not Precision.BF16)


def _fused_core(shape: AttentionShape, element: int) -> tuple[Op, ...]:
    # The kernel keeps q, k, v and a log-sum-exp per row; its output is kept by the output projection.
    q = shape.queries * shape.heads * shape.head_dim * element
    kv = 2 * shape.keys * shape.kv_heads * shape.head_dim * element
    flops = 4 * shape.queries * shape.span * shape.heads * shape.head_dim
    return (
        Op(
            flops=flops // 2 if shape.causal else flops,
            split=q + kv + shape.heads * shape.queries * FP32 + shape.fused_bias_bytes,
            gradient=q + kv,
            # A learned bias gets its gradient as a whole map before that is summed over the batch.
            scratch=shape.heads * shape.queries * shape.span * element if shape.fused_bias_bytes else 0,
            result=q + shape.heads * shape.queries * FP32,
            result_split=True,
            attends=True,
        ),
    )


def _eager_core(shape: AttentionShape, training: Training) -> tuple[Op, ...]:
    element = training.precision.bytes
    q = shape.queries * shape.heads * shape.head_dim * element
    # Grouped key/value heads are repeated to one per query head before the products.
    k = shape.keys * shape.heads * shape.head_dim * element
    cells = shape.heads * shape.queries * shape.span
    cell_map = cells * element
    soft_map = cells * (FP32 if shape.fp32_softmax else element)
    product = 2 * shape.queries * shape.span * shape.heads * shape.head_dim
    casts = (Op(gradient=soft_map, held=k),) if soft_map != cell_map else ()
    scores_kept = cell_map if training.attention is Attention.PAPER else 0
    probabilities = soft_map
    if training.compile and casts:  # which makes them again from scores, and from each row's maximum and sum
        probabilities = cell_map + 2 * shape.heads * shape.queries * FP32
    drop = dropout(cells, active=shape.dropout, element=element, split=True)
    copy_kept = cell_map if casts or drop else 0  # else the product keeps the softmax's own output
    return (
        Op(flops=product, split=q + k, gradient=q + k, held=k),  # scores; the gradient of v waits from here on
        Op(gradient=cell_map, held=k),  # scale
        # Softmax: its backward first multiplies gradient and output into a third map.
        Op(split=probabilities + scores_kept, gradient=soft_map, scratch=soft_map, held=k),
        *casts,
        *drop,
        Op(flops=product, split=k + copy_kept, gradient=cell_map + k),  # weighted sum of v
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardShape:
    """One feed-forward part."""

    tokens: int
    hidden: int
    inner: int
    activation: str
    bias: bool
    gated: bool = False
    """Two parallel projections, one through the activation, multiplied (Llama, T5 1.1)."""
    inner_dropout: bool = False
    """Dropout between activation and second projection (T5)."""


def feed_forward(shape: FeedForwardShape, training: Training) -> tuple[Op, ...]:
    """First projection, activation, second projection."""
    element = training.precision.bytes
    cells = shape.tokens * shape.inner
    width = shape.inner * (2 if shape.gated else 1)
    first = linear(shape.tokens, shape.hidden, width, Split.COLUMNS, element=element, bias=shape.bias)
    second = linear(shape.tokens, shape.inner, shape.hidden, Split.ROWS, element=element, bias=shape.bias)
    drop = dropout(cells, active=shape.inner_dropout, element=element, split=True)
    # A gate's product keeps both its factors: the activation's output, which a compiler makes again, and the other
    # projection.
    factors = 1 if training.compile else 2
    gate = (Op(split=factors * cells * element, gradient=2 * cells * element),) if shape.gated else ()
    act = activation(shape.activation, cells, element=element, output_kept=shape.gated or not drop)
    if training.compile:
        act = compiled_activation(shape.activation, cells, element=element, output_kept=not drop, gated=shape.gated)
    return (first, act, *gate, *drop, second)


class RmsNorm(Enum):
    """The two ways Hugging Face writes an RMS norm; both compute in fp32."""

    LLAMA = auto()
    """Works on an fp32 copy throughout: keeps it, and the normalised tensor."""
    T5 = auto()
    """Squares an fp32 copy but scales the original: in bf16 keeps both, and the normalised tensor."""


def rms_norm(tokens: int, hidden: int, kind: RmsNorm, *, element: int, compiled: bool = False) -> Op:
    """An RMS norm made of single operations, each keeping its operands. Compiled it keeps its input and a statistic."""
    if compiled:
        return Op(
            parameters=hidden,
            replicated_parameters=hidden,
            replicated=tokens * hidden * element + tokens * FP32,
            gradient=tokens * hidden * element,
        )
    original = element if kind is RmsNorm.T5 and element != FP32 else 0
    return Op(
        parameters=hidden,
        replicated_parameters=hidden,
        replicated=tokens * hidden * (FP32 + original + element) + tokens * FP32,
        gradient=2 * tokens * hidden * FP32,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """The projection of hidden states to the vocabulary."""

    tokens: int
    hidden: int
    vocabulary: int
    bias: bool = False
    tied: bool
    """Whether its weight is that of the embedding."""


def language_head(ops: tuple[Op, ...], training: Training, shape: HeadShape, *, boundary: int) -> LayerSpec:
    """The layer that ends a language model: ``ops``, then logits and cross-entropy in fp32.

    Saved are the log-probabilities. Backward makes their gradient and the logits', fp32 both: two tensors of tokens ×
    vocabulary on top. In the paper's runs the logits count as saved (its Table 1) and the working set is a fitted
    multiple.
    """
    tokens, hidden, vocabulary = shape.tokens, shape.hidden, shape.vocabulary
    element = training.precision.bytes
    cells = tokens * vocabulary
    paper = training.attention is Attention.PAPER
    logits = linear(tokens, hidden, vocabulary, Split.COLUMNS, element=element, bias=shape.bias)
    logits = replace(logits, tied_parameters=vocabulary * hidden if shape.tied else 0)
    loss = Op(split=cells * FP32 + (cells * element if paper else 0), gradient=2 * cells * FP32)
    head = layer(
        "head",
        (*ops, logits, loss),
        boundary=boundary,
        incoming=0,
        tensor_parallel=collectives(tokens * hidden * element, forward=0, backward=1, sequence_divides=(tokens,)),
    )
    if paper:
        return replace(head, transient_bytes=int(_PAPER_LOGIT_MAPS * cells * FP32))
    fused = FusedLoss(logits=cells, saved_bytes=cells * FP32, parameters=hidden * vocabulary, words=vocabulary)
    return replace(head, fused_loss=fused)


def paper_block(block: LayerSpec, training: Training) -> LayerSpec:
    """A block with the working set it had in the paper's runs, where it is trained as there; else unchanged.

    Each saved tensor has a gradient of its size at some time in backward, and the allocator kept most of those blocks.
    """
    if training.attention is not Attention.PAPER:
        return block
    working = int(_PAPER_BLOCK_SHARE * block.activation_bytes)
    return replace(block, transient_bytes=working, selective=None, but_attention=None)


def class_head(tokens: int, hidden: int, labels: int, training: Training, *, pooled: bool) -> LayerSpec:
    """The layer that ends an image classifier: norm, one vector an image, scores.

    Averaging (``pooled``) keeps only the average; taking the class token keeps a view of the whole normalised tensor.
    """
    element = training.precision.bytes
    scores = linear(1 if pooled else tokens, hidden, labels, Split.WHOLE, element=element, bias=True)
    scores = replace(scores, flops=2 * hidden * labels)
    ops = (layer_norm(tokens, hidden, element=element), scores, Op(replicated=labels * element))
    return layer("head", ops, boundary=tokens * hidden * element, incoming=0, tensor_parallel=None)


def token_count(training: Training, longest: int, *, model: str, learned_positions: bool) -> int:
    """Tokens a sample: what training asks for, else the model's own maximum up to what people train with."""
    tokens = min(longest, DEFAULT_LONGEST) if training.sequence_length is None else training.sequence_length
    if learned_positions and tokens > longest:
        raise InvalidInput(
            f"{model}: sequence length {tokens} is too long: the model has {longest} learned positions; "
            f"use at most {longest}"
        )
    return tokens


def refuse_sequence_length(training: Training, *, model: str) -> None:
    """Image models have as many tokens as the image has patches."""
    if training.sequence_length is not None:
        raise InvalidInput(
            f"{model}: sequence length {training.sequence_length} was given, but the size of the image decides how "
            "many tokens there are; leave it out"
        )
