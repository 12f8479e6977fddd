"""Weights that several blocks of a model have in common: no part of them may be split."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from galvatron.families.generic.tensor_rules import TensorRules
from galvatron.families.rules import Columns, Rows, Rule, Table

__all__ = ["without_shared"]


def without_shared(rules: TensorRules, blocks: Sequence[nn.Module], kinds: Sequence[str]) -> TensorRules:
    """Kinds that would split a weight of several blocks have no rules: only tables of words are used across layers in
    parts."""
    users: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        for name, own in block.named_parameters(prefix="block"):
            users.setdefault(own, []).append((kind, name))
    shared = {use for uses in users.values() if len(uses) > 1 for use in uses}
    whole = {kind for kind, name in shared if any(_splits(rule, name) for rule in rules.blocks.get(kind, ()))}
    if not whole:
        return rules
    return TensorRules(refused="its blocks share weights, which TP cannot split")


def _splits(rule: Rule, name: str) -> bool:
    if isinstance(rule, Table):
        return rule.path == name
    return isinstance(rule, Columns | Rows) and name.startswith(f"{rule.path}.")
