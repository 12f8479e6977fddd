"""What Megatron-LM's flags mean for a price: which say the layout, which change the model, which do nothing to it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase

from galvatron.core.errors import InvalidInput
from galvatron.planner.exchange.reading import check_spelling

__all__ = ["LAYOUT_FLAGS", "MODEL_FLAGS", "Flags", "flag_kind", "parse_flags"]

Flags = Mapping[str, tuple[str, ...]]
"""Each flag without its dashes, and its values."""

LAYOUT_FLAGS = frozenset({
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "sequence-parallel", "micro-batch-size",
    "global-batch-size", "seq-length", "use-distributed-optimizer", "use-megatron-fsdp", "use-custom-fsdp",
    "use-torch-fsdp2", "data-parallel-sharding-strategy", "recompute-granularity", "recompute-method",
    "recompute-num-layers", "recompute-modules", "recompute-activations", "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "bf16", "fp16", "optimizer", "overlap-grad-reduce", "overlap-param-gather",
})  # fmt: skip
"""Those that are priced."""
MODEL_FLAGS = {
    "num-layers": ("num_hidden_layers", "n_layer"),
    "hidden-size": ("hidden_size", "n_embd"),
    "ffn-hidden-size": ("intermediate_size", "n_inner"),
    "num-attention-heads": ("num_attention_heads", "n_head"),
    "num-query-groups": ("num_key_value_heads",),
    "num-experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe-router-topk": ("num_experts_per_tok",),
}
"""Those that must agree with the model, and the names that Hugging Face's configurations have for them."""
_REFUSED = {
    "use-tp-pp-dp-mapping": "it puts pipeline ranks next to each other, which our clusters' stages are not",
    "cpu-offloading": "activations on the host are not priced for other systems",
    "cpu-offloading-num-layers": "activations on the host are not priced for other systems",
    "optimizer-cpu-offload": "optimizer states on the host are not priced",
    "fine-grained-activation-offloading": "activations on the host are not priced for other systems",
    "num-distributed-optimizer-instances": "optimizer states divided among a part of the replicas are not priced",
    "mtp-num-layers": "layers for several tokens ahead are not part of our models",
    "freeze-LM": "frozen parameters are not priced from flags; 'galvatron plan --freeze' does",
}
_UNPRICED = (
    "tp-comm-overlap*", "fp8*", "fp4*", "overlap-*", "no-overlap-*", "moe-grouped-gemm", "moe-token-dispatcher*",
    "moe-permute-fusion", "moe-flex-dispatcher*", "moe-expert-capacity-factor", "moe-shared-expert*",
    "moe-pad-expert*", "cross-entropy-*", "*cuda-graph*", "defer-embedding-wgrad-compute", "*-fusion",
    "grad-reduce-in-bf16",
    "use-precision-aware-optimizer", "exp-avg*", "main-grads-dtype", "main-params-dtype", "accumulate-allreduce-*",
    "fsdp-double-buffer", "use-nccl-ub", "nccl-ub", "use-flash-attn", "attention-backend",
    "transformer-impl", "delay-wgrad-compute", "batch-invariant*", "delayed-*", "use-transformer-engine*",
    "ddp-*", "no-align-*", "barrier-*", "microbatch-group-size-per-virtual-pipeline-stage", "deallocate-*",
    "enable-experimental", "moe-router-fusion",
)  # fmt: skip
"""Patterns of those that change the speed or the memory of a run by what is not priced."""
_NO_PART = (
    "lr*", "min-lr", "log-*", "no-log-*", "save*", "load*", "no-save-*", "no-load-*", "data-*", "train-*", "eval-*",
    "valid-*", "test-*", "tensorboard-*", "wandb-*", "tokenizer-*", "init-*", "seed", "weight-decay*", "adam-*",
    "sgd-*", "clip-grad", "split", "distributed-backend", "distributed-timeout-minutes", "num-workers", "exit-*",
    "timing-*", "norm-epsilon", "layernorm-epsilon", "attention-dropout", "hidden-dropout", "position-embedding-type",
    "rotary-*", "use-rotary-*", "no-rope-*", "normalization", "swiglu", "squared-relu", "disable-bias-linear",
    "add-qkv-bias", "untie-embeddings-and-output-weights", "max-position-embeddings", "make-vocab-size-divisible-by",
    "vocab-*", "merge-file", "use-mcore-models", "use-legacy-models", "attention-softmax-in-fp32",
    "group-query-attention", "kv-channels", "manual-gc*", "use-checkpoint-*", "ckpt-*", "dist-ckpt-*",
    "use-dist-ckpt", "async-save", "mock-data", "moe-aux-loss-coeff", "moe-router-*", "moe-z-loss-coeff",
    "moe-ffn-hidden-size", "moe-layer-freq", "qk-layernorm", "apply-layernorm-1p", "override-*", "rampup-batch-size",
    "sample-rate", "calculate-per-token-loss", "finetune", "spec", "export-*", "reset-*", "eod-mask-loss",
    "distribute-saved-activations", "local-rank", "use-cpu-initialization", "dataloader-type", "num-dataset-*",
    "no-check-*", "check-*", "no-create-attention-mask-in-dataloader", "no-mmap-bin-files", "profile*",
    "decoder-seq-length",
    "empty-unused-memory-level", "tiktoken-*", "te-rng-tracker", "inference-*", "retro-*", "multi-latent-attention",
    "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "mscale*",
)  # fmt: skip
"""Patterns of those that say nothing about speed or memory, or that the model says."""


def parse_flags(text: str) -> dict[str, tuple[str, ...]]:
    """Flags as a shell reads them; of a flag given twice the last counts, as in Megatron. Raises for what is no flag,
    for a misspelt flag of the layout, and for one that cannot be priced."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidInput(f"from: the flags cannot be read: {error}; quote them as for a shell") from None
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found[name] = (value,) if equals else ()
        elif not name:
            raise InvalidInput(f"from: {word!r} given before any flag; expected flags such as --micro-batch-size 1")
        else:
            found[name] = (*found[name], word)
    for name in found:
        if name in _REFUSED:
            raise InvalidInput(f"from: --{name} cannot be priced: {_REFUSED[name]}; drop it")
        if flag_kind(name) == "unknown":
            check_spelling(name, [*LAYOUT_FLAGS, *MODEL_FLAGS], "Megatron-LM", "--")
    return found


def flag_kind(name: str) -> str:
    """``layout``, ``model``, ``unpriced``, ``no part`` or ``unknown``."""
    if name in LAYOUT_FLAGS:
        return "layout"
    if name in MODEL_FLAGS:
        return "model"
    if any(fnmatchcase(name, pattern) for pattern in _UNPRICED):
        return "unpriced"
    return "no part" if any(fnmatchcase(name, pattern) for pattern in _NO_PART) else "unknown"
