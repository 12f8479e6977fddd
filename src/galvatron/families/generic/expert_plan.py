"""The experts of a stock model that expert parallelism can divide: from its own plan (``model.ep_plan``, such as
``"model.layers.*.mlp.experts.down_proj": "grouped_gemm"``), and, where it has none, those in transformers' standard
form.

Experts that we cannot divide are named, and then none are. The standard form also says how tensor parallelism can split
them, which few plans do (gpt-oss has none).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from galvatron.families.generic.tensor_plan import rules_within, starred
from galvatron.families.rules import AddedBias, DividedExperts, Experts, Rule, Table

__all__ = ["ExpertRules", "find_experts"]

_DIVIDED = "grouped_gemm"
"""The plan's word for a parameter that has the experts along its first dim."""
_STANDARD = re.compile(r"(gate_up|up|down)_proj(_bias)?")
"""Parameters of experts in transformers' standard form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRules:
    """The experts of a model's blocks."""

    blocks: Mapping[str, DividedExperts] = field(default_factory=dict)
    """For each kind that has some, with paths in its layer."""
    refused: str = ""
    """Why none can be divided though the model has experts."""


class _NoExpertParallelism(Exception):
    """Why experts cannot be divided."""


def find_experts(model: nn.Module, blocks: Sequence[str], kinds: Sequence[str]) -> ExpertRules:
    """The experts of each kind of block; ``blocks``: the name of each."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    try:
        found = {kind: _block_experts(model, blocks[index]) for kind, index in first.items()}
    except _NoExpertParallelism as reason:
        return ExpertRules(refused=str(reason))
    return ExpertRules(
        blocks={
            kind: replace(own, path=f"block.{own.path}", split=rules_within("block", own.split))
            for kind, own in found.items()
            if own is not None
        }
    )


def _block_experts(model: nn.Module, name: str) -> DividedExperts | None:
    plan = getattr(model, "ep_plan", None)
    plan = dict(plan) if isinstance(plan, Mapping) else {}

    def planned(path: str, module: nn.Module) -> frozenset[str]:
        names = (own for own, _ in module.named_parameters(recurse=False))
        return frozenset(own for own in names if plan.get(starred(f"{name}.{path}.{own}")) == _DIVIDED)

    found = [
        (path, module, planned(path, module))
        for path, module in model.get_submodule(name).named_modules()
        if path and (planned(path, module) or _standard(module))
    ]
    if len(found) > 1:
        paths = " and ".join(path for path, _, _ in found)
        raise _NoExpertParallelism(f"a block has several modules of experts ({paths}), expected one")
    return _divided(*found[0]) if found else None


def _standard(module: nn.Module) -> bool:
    """Whether a module has the form of ``transformers.integrations.moe.use_experts_implementation``."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")


def _divided(path: str, module: nn.Module, planned: frozenset[str]) -> DividedExperts:
    kind = type(module).__name__
    arguments = list(inspect.signature(module.forward).parameters)
    if len(arguments) != 3 or "ind" not in arguments[1] or "weight" not in arguments[2]:
        raise _NoExpertParallelism(
            f"{path} ({kind}) takes {', '.join(arguments)}; expected hidden states, the index of each token's experts "
            "and their weights"
        )
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int):
        raise _NoExpertParallelism(f"{path} ({kind}) does not say how many experts it has (num_experts)")
    for name, own in module.named_parameters():
        known = name in planned if planned else _STANDARD.fullmatch(name)
        if not known or own.ndim < 2 or own.shape[0] != count:
            raise _NoExpertParallelism(
                f"{path}.{name} of shape {list(own.shape)} is no parameter with {count} experts along its first dim"
            )
    return DividedExperts(path, count, tuple(name for name, _ in module.named_parameters()), _split(path, module))


def _split(path: str, module: nn.Module) -> tuple[Rule, ...]:
    """How TP can split experts in transformers' standard form: the first projections by their outputs, the last by its
    inputs. Empty: the module does not say how it is made, or a norm needs what it makes whole."""
    transposed, concatenated = getattr(module, "is_transposed", None), getattr(module, "is_concatenated", None)
    if transposed is None or concatenated is None or getattr(module, "has_post_expert_norm", False):
        return ()
    rules: list[Rule] = [Experts(path)]
    for name, _ in module.named_parameters():
        full = f"{path}.{name}"
        fused = name.startswith("gate_up")
        parts, pairs = 2 if fused and concatenated else 1, fused and not concatenated
        match name.removesuffix("_bias").removeprefix("gate_"), name.endswith("_bias"):
            case "up_proj", True:
                rules.append(Table(full, 1, parts, pairs))
            case "up_proj", False:
                rules.append(Table(full, 2 if transposed else 1, parts, pairs))
            case "down_proj", True:
                rules.append(AddedBias(full))
            case "down_proj", False:
                rules.append(Table(full, 1 if transposed else 2))
            case _:
                return ()
    return tuple(rules)
