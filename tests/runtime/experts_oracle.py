"""Models with experts, their plans, and how training under these compares with the stock model in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import expert_mutants  # noqa: F401 (so that ranks know them)
import torch
from mutants import under
from oracle import Case, Record, batches, stock_loss, stock_model, trained
from parity import Trained, difference, run
from ranks import ranks
from torch import Tensor, nn
from torch.nn import functional

import galvatron
from galvatron.core.errors import Unequal
from galvatron.core.spec import Attention, Training
from galvatron.families.build import without_weights
from galvatron.families.layer import IGNORED
from galvatron.families.registry import layered_model
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.unpriced import facts_of, unpriced

__all__ = ["MODELS", "ExpertCase", "built", "case", "compare", "expert_plan", "stock"]

_SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SMALL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "qwen3_moe": {
        **_SMALL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 8,
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    # What a shared expert made is added to the experts' output in place.
    "qwen2_moe": {
        **_SMALL,
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    # A dense block, then one with a shared expert; the router chooses groups of experts first.
    "deepseek_v3": {
        **_SMALL,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Experts with biases and transposed weights, whose gates stand between what they multiply.
    "gpt_oss": {
        **_SMALL,
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 8,
        "num_local_experts": 4,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
"""Each has four layers, embedding and head among them."""


@dataclass(frozen=True, kw_only=True)
class ExpertCase(Case):
    """A model with experts and its plan."""

    tokens: int = 5
    """Of a sample; no number of ranks divides the default."""
    skewed: bool = False
    """All tokens choose the first two experts."""

    @property
    def balanced(self) -> bool:
        """Whether the loss has a term for the balance of experts."""
        return bool(self.config.get("output_router_logits"))

    @property
    def key(self) -> str:
        """The term is that of each micro-batch."""
        return f"{super().key} {self.micro_batches if self.balanced else ''}"

    @property
    def fp32_inside(self) -> bool:
        """Routers compute their weights in fp32."""
        return True

    @property
    def length(self) -> int:
        return self.tokens


def case(family: str, *stages: list[str], **options: Any) -> ExpertCase:
    """A case of one of the models, small unless said otherwise."""
    attention = Attention.EAGER if family == "gpt_oss" else Attention.FUSED
    training = Training(dropout=False, attention=attention)
    given = {"batch": 8, "micro_batches": 2, "steps": 2, "training": training, **options}
    config = {"model_type": family, **MODELS[family], **given.pop("config", {})}
    return ExpertCase(config=config, stages=list(stages), **given)


def stock(case: ExpertCase) -> nn.Module:
    """The stock model in memory; in fp64, which grouped products do not know, with its loop over experts."""
    model = stock_model(case)
    if case.dtype == torch.float64:
        model.set_experts_implementation("eager")  # type: ignore[operator]
    if case.skewed:
        with torch.no_grad():
            for name, own in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("router.bias", "e_score_correction_bias")):
                    own[:2] += 1000.0
    return model


def expert_plan(case: ExpertCase) -> galvatron.Plan:
    """The case's plan, without prices."""
    layered = layered_model(without_weights(stock(case)))
    facts = replace(facts_of(layered, case.training, case.config["model_type"]), config=case.config)
    plan = unpriced(facts, case.stages)
    return replace(plan, batch=case.batch, micro_batches=case.micro_batches, schedule=case.schedule)


# On a rank


def built(case: ExpertCase, plan: galvatron.Plan) -> ParallelModel:
    return galvatron.parallelize(stock(case), plan, dtype=case.dtype, device="cpu", check=False)


def _train(case: ExpertCase, plan: galvatron.Plan, given: list[dict[str, Tensor]]) -> tuple[Trained, str | None]:
    """What a rank has, and which replicas differ."""
    model = built(case, plan)
    found = run(case, model, given)
    try:
        model.compare_replicas()
    except Unequal as error:
        return found, str(error)
    return found, None


# In the parent

_records: dict[str, Record] = {}


def _by_micro_batches(count: int, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The stock model run on each micro-batch: the mean over all targets, and the mean of its terms for the balance."""
    coefficient: float = model.config.router_aux_loss_coef  # type: ignore[union-attr, assignment]
    targets = int((batch["labels"][:, 1:] != IGNORED).sum())
    total = torch.zeros((), dtype=torch.float64)
    for part in zip(*(own.chunk(count) for own in batch.values()), strict=True):
        given = dict(zip(batch, part, strict=True))
        output = model(**given)
        logits, labels = output.logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten()
        own = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        expected = own / (labels != IGNORED).sum() + coefficient * output.aux_loss
        torch.testing.assert_close(output.loss, expected.to(output.loss.dtype), rtol=1e-4, atol=1e-4)
        total = total + own / targets + coefficient * output.aux_loss / count
    return total


def compare(case: ExpertCase, mutant: str | None = None) -> str | None:
    """What differs from one process, if anything does."""
    if case.key not in _records:
        losses = partial(_by_micro_batches, case.micro_batches) if case.balanced else stock_loss
        _records[case.key] = trained(case, stock(case), losses)
    found = ranks(case.devices).run(under, mutant, _train, case, expert_plan(case), batches(case))
    return difference(case, [own for own, _ in found], _records[case.key]) or found[0][1]
