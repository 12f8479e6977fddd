"""The basic parallelisms, and the switches beside them: extensions of the paper's space, each declared here alone.

Whatever names a switch (the text of a strategy, the space, a plan's record, the options of the command line and of
Python) reads its declaration. What a switch costs and how it is carried out is for the cost model and the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TypedDict

__all__ = [
    "CONTEXT_KINDS",
    "DENSE_KINDS",
    "LAYER_SWITCHES",
    "SWITCHES",
    "Kind",
    "LayerSwitches",
    "Switch",
    "SwitchChoices",
    "Switches",
]


class Kind(StrEnum):
    """A basic parallelism inside a stage (paper Section 3.1)."""

    DP = "dp"
    """Data parallelism: samples divided, parameters replicated."""
    SDP = "sdp"
    """Sharded data parallelism (ZeRO-3, FSDP): samples and all states divided."""
    TP = "tp"
    """Tensor parallelism (Megatron): weights and inner activations divided."""
    EP = "ep"
    """Expert parallelism: each expert is on some devices only, and tokens travel to their experts. Only the axes of a
    layer's experts have it."""
    RING = "ring"
    """Context parallelism by ring attention: sequences divided, keys and values go round among the ranks."""
    ULYSSES = "ulysses"
    """Context parallelism as in DeepSpeed-Ulysses: sequences divided, but in attention heads instead, by all-to-all."""


DENSE_KINDS: tuple[Kind, ...] = (Kind.DP, Kind.SDP, Kind.TP)
"""The paper's kinds, which the axes of any layer can have."""

CONTEXT_KINDS: tuple[Kind, ...] = (Kind.RING, Kind.ULYSSES)
"""The kinds of context parallelism (CP), for layers whose sequences can be divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """What is to be known of a switch wherever it is named."""

    name: str = ""
    """That of the field which declares it; filled in below."""
    title: str
    """In the middle of a sentence."""
    help: str
    """Of its option on the command line."""
    text: str = ""
    """How a strategy that uses it ends: "rc" for "+rc"; empty: it is a choice for the whole space, not for a layer."""
    note: str = ""
    """What it does to a layer, in the legend of a plan."""
    needs: frozenset[Kind] = frozenset()
    """Axes of which a layer must have one to use it; none: any layer can."""
    excludes: frozenset[Kind] = frozenset()
    """Axes with which a layer cannot use it."""
    space_needs: frozenset[Kind] = frozenset()
    """Kinds without which a space has no use for it: asking for it there is a mistake."""
    without: frozenset[str] = frozenset()
    """Other switches of a layer with which it cannot be used."""
    default: bool = True
    """Whether it is on where nobody says; in the paper's setting all are off."""
    uneven_links_only: bool = False
    """Whether the default holds only on clusters whose islands differ in speed."""
    remedy: str | None = None
    """How it makes a plan fit that does not, as advice; None: it is not advised."""

    @property
    def per_layer(self) -> bool:
        return bool(self.text)

    @property
    def option(self) -> str:
        """Its name on the command line, without the dashes before it."""
        return self.name.replace("_", "-")

    def possible(self, kinds: frozenset[Kind]) -> bool:
        """Whether a layer whose axes are of these kinds can use it."""
        return bool(not self.needs or self.needs & kinds) and not self.excludes & kinds

    @property
    def condition(self) -> str:
        """What :meth:`possible` asks for, in words."""
        kinds = [kind for kind in Kind if kind in self.needs]
        needed = [f"a {' or '.join(kinds)} axis"] if kinds else []
        return " and ".join(needed + [f"no {kind} axis" for kind in Kind if kind in self.excludes])


@dataclass(frozen=True, kw_only=True)
class LayerSwitches:
    """The switches of a layer. In a strategy: whether it uses them; in a space: whether its strategies may.

    A strategy's text names them in the opposite order, so that the last one declared is written first.
    """

    recompute: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="rc",
                title="recompute",
                help="Activation recomputation, chosen layer by layer; --no-recompute leaves out its two grades too.",
                note="recomputed in backward",
                remedy="keep only each layer's input and run forward again",
            )
        },
    )
    """Keep only the layer's input and run its forward again in backward."""
    selective_recompute: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="rs",
                title="selective recompute",
                help="Recompute of all but matrix products and attention.",
                note="all but matrix products and attention recomputed",
                without=frozenset({"recompute"}),
                remedy="keep the results of matrix products and attention and recompute the rest",
            )
        },
    )
    """Keep the results of products with weights, of fused attention and of collectives; recompute the rest."""
    recompute_but_attention: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="ra",
                title="recompute but attention",
                help="Recompute of all but attention.",
                note="all but attention recomputed",
                without=frozenset({"recompute", "selective_recompute"}),
                remedy="keep the results of attention beside each layer's input and recompute the rest",
            )
        },
    )
    """Keep the layer's input and the results of fused attention and of collectives; recompute the rest."""
    offload: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="host",
                title="offload",
                help="Saved activations in the host's memory.",
                note="saved activations in the host's memory",
                without=frozenset({"recompute", "selective_recompute", "recompute_but_attention"}),
                remedy="keep saved activations in the host's memory",
            )
        },
    )
    """Copy what the layer saves for backward to the host's memory, and back one layer ahead."""
    sequence_parallel: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="sp",
                title="sequence parallelism",
                help="Sequence parallelism together with TP.",
                note="sequence split too",
                needs=frozenset({Kind.TP}),
            )
        },
    )
    """Megatron's sequence parallelism: what TP would replicate is divided along the sequence, where there is one."""
    zero2: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="zero2",
                title="ZeRO-2",
                help="ZeRO-2: shard gradients and optimizer states, not parameters.",
                note="gradients and optimizer sharded",
                needs=frozenset({Kind.DP, *CONTEXT_KINDS}),
                excludes=frozenset({Kind.SDP}),
                space_needs=frozenset({Kind.DP, Kind.SDP}),
            )
        },
    )
    """DP and context axes shard gradients and optimizer states, but keep parameters whole (ZeRO stage 2)."""
    zero3: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="zero3",
                title="ZeRO-3",
                help="ZeRO-3 over context parallelism alone: shard all states where a batch is too small for SDP.",
                note="all states sharded over context ranks",
                needs=frozenset(CONTEXT_KINDS),
                excludes=frozenset({Kind.DP, Kind.SDP}),
                space_needs=frozenset({Kind.SDP}),
                without=frozenset({"zero2"}),
            )
        },
    )
    """Context axes shard parameters, gradients and optimizer states, as SDP does where there is one."""
    fused_loss: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="fl",
                title="fused loss",
                help="Compute the loss in chunks, without keeping the logits.",
                note="loss in chunks, no logits kept",
                without=frozenset({"recompute", "selective_recompute", "recompute_but_attention", "offload"}),
                remedy="compute the loss in chunks and keep no logits",
            )
        },
    )
    """Projection and cross-entropy in chunks of tokens, gradients in the forward pass; of a head that can."""

    float8: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                text="f8",
                title="float8",
                help="Linear layers in float8 where it pays (default: off, for it rounds more).",
                note="large linear layers in float8",
                excludes=frozenset({Kind.TP}),
                without=frozenset({"selective_recompute", "recompute_but_attention"}),  # which know other products
                default=False,
            )
        },
    )
    """Products of the layer's large linear layers in float8, scaled by rows (torchao)."""


@dataclass(frozen=True, kw_only=True)
class Switches(LayerSwitches):
    """Extensions of the paper's space, each on or off; a plan records them."""

    hybrid_sharding: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                title="hybrid sharding",
                help="Allow HSDP: DP between islands over SDP inside them (the paper leaves it out).",
                space_needs=frozenset({Kind.DP, Kind.SDP}),
                uneven_links_only=True,
            )
        },
    )
    """DP over SDP in one layer: turns Takeaway #3 off."""
    accumulation: bool = field(
        default=False,
        metadata={
            "switch": Switch(title="accumulation", help="Gradient accumulation: micro-batches without a pipeline.")
        },
    )
    """Micro-batches without a pipeline: gradients accumulate over them."""
    expert_parallel: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                title="expert parallelism",
                help="Expert parallelism: the experts of a layer are divided over devices on their own.",
                space_needs=frozenset({Kind.EP}),
                remedy="keep each expert on some of the devices and send its tokens there",
            )
        },
    )
    """The experts of a layer may have axes of their own; of no use to models without experts."""
    context_parallel: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                title="context parallelism",
                help="Divide sequences over devices, by Ulysses and ring attention (default: from 16384 tokens on).",
                space_needs=frozenset(CONTEXT_KINDS),
                default=False,
                remedy="divide sequences over devices",
            )
        },
    )
    """Layers may have Ring and Ulysses axes."""
    context_orders: bool = field(
        default=False,
        metadata={
            "switch": Switch(
                title="any order of context axes",
                help="Try Ring and Ulysses axes in every order over the links, not only the usual one; takes longer.",
                space_needs=frozenset(CONTEXT_KINDS),
                default=False,
            )
        },
    )
    """Turns rule context-1 off."""


class SwitchChoices(TypedDict, total=False):
    """What a user may say about each switch of :class:`Switches`; None or nothing: the default."""

    recompute: bool | None
    selective_recompute: bool | None
    recompute_but_attention: bool | None
    offload: bool | None
    sequence_parallel: bool | None
    zero2: bool | None
    zero3: bool | None
    fused_loss: bool | None
    float8: bool | None
    hybrid_sharding: bool | None
    accumulation: bool | None
    expert_parallel: bool | None
    context_parallel: bool | None
    context_orders: bool | None


SWITCHES: tuple[Switch, ...] = tuple(replace(each.metadata["switch"], name=each.name) for each in fields(Switches))
LAYER_SWITCHES: tuple[Switch, ...] = tuple(switch for switch in SWITCHES if switch.per_layer)
