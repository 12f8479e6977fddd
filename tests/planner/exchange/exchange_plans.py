"""Plans of models on clusters, and their exports, made once for all tests of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sparse_layer import sparse_layer

from galvatron.planner.exchange.export import Export, export_plan, target_named
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.setup import Setup, request_for

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_LARGE = {**_LLAMA, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008, "num_hidden_layers": 30}
_EXPERTS = f"""
name = "experts"

[[layers]]
name = "embedding"
parameters = 65_000_000
forward_flops = 1e6
activation_bytes = "8MiB"
boundary_bytes = "8MiB"
tensor_parallel = {{ heads = 16 }}
{sparse_layer("block", count=4, experts=8)}
[[layers]]
name = "head"
parameters = 65_000_000
forward_flops = 100e9
activation_bytes = "64MiB"
boundary_bytes = "1KiB"
tensor_parallel = {{ heads = 16 }}
"""

PLANS: dict[str, tuple[dict[str, Any] | str, str, Setup]] = {
    "one device": (_LLAMA, "h100:1", Setup(batch=8)),
    "all fits": (_LLAMA, "h100:4", Setup(batch=32)),
    "little memory": (_LLAMA, "rtx4090:4", Setup(batch=16, memory="12GiB", sequence_parallel=False)),
    "slow links": (_LLAMA, "l4:4", Setup(batch=32, memory="16GiB", forbid="tp")),
    "two nodes": (_LLAMA, "a100:2x2", Setup(batch=16, memory="20GiB")),
    "pipeline": (_LARGE, "rtx4090:8", Setup(batch=64, pipeline=4)),
    "tensor": (_LARGE, "a100:8", Setup(batch=16, forbid="dp,sdp", pipeline=1)),
    "experts": (_EXPERTS, "a100:4", Setup(batch=16, memory="24GiB", pipeline=1, sequence_parallel=False)),
}
"""Model, cluster and setup of each."""


@cache
def plan_of(name: str) -> Plan:
    """The plan of this name."""
    model, cluster, setup = PLANS[name]
    if not isinstance(model, str):
        return make_plan(request_for(model, cluster, setup))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "experts.toml"
        file.write_text(model)
        return make_plan(request_for(file, cluster, setup))


@cache
def exported(name: str, target: str) -> Export:
    """The plan of this name for a system."""
    return export_plan(plan_of(name), target_named(target))
