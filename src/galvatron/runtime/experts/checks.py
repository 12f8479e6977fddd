"""What is wrong with the axes that a plan gives the experts of a layer, found before anything exists."""

from __future__ import annotations

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Kind, Strategy, degree_of
from galvatron.families.generic.adapter import Generic
from galvatron.families.layer import LayeredModel
from galvatron.families.rules import AddedBias, Summed
from galvatron.runtime.experts.dispatch import expert_tables

__all__ = ["check_experts"]


def check_experts(layered: LayeredModel, index: int, field: str, strategy: Strategy) -> None:
    """The experts of a layer must go with the axes that its strategy gives them; ``field``: where the plan says so."""
    if not strategy.experts:
        return
    layer = layered.layers[index]
    experts = layer.experts
    given = f"{field}: {str(strategy)!r} has axes for experts"
    if experts is None:
        refused = layered.expert_rules.refused if isinstance(layered, Generic) else ""
        reason = f"those of this model cannot be divided: {refused}" if refused else "this layer has none"
        raise InvalidInput(f"{given}, but {reason}; leave out what follows the slash")
    degree = degree_of(strategy.expert_factors(Kind.EP))
    if experts.count % degree:
        raise InvalidInput(f"{given} that divide them {degree} ways, which must divide their number {experts.count}")
    tensor = strategy.expert_factors(Kind.TP)
    if tensor and expert_tables(layer, experts) is None:
        reason = (
            f"{experts.path} has a bias that tp cannot split"
            if any(isinstance(rule, AddedBias) for rule in experts.split)
            else f"transformers' plan for this model does not say how to split {experts.path}"
        )
        raise InvalidInput(f"{given} with tp, but {reason}; leave tp out of the experts' axes")
    summed = [rule.path for rule in layer.rules if isinstance(rule, Summed)]
    around = [path for path in summed if experts.path.startswith(f"{path}.")]
    if strategy.factors(Kind.TP) and around:
        raise InvalidInput(f"{given} beside tp, which sums all outputs of {around[0]}, in which its experts are")
    own = {f"{experts.path}.{name}" for name in experts.parameters}
    if any(use.layer == index and use.name in own for tie in layered.ties for use in tie.uses):
        raise InvalidInput(f"{given}, but some of them are tied to those of another layer")
