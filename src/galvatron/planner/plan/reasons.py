"""Why a strategy that somebody wrote cannot run a layer, in words."""

from __future__ import annotations

from galvatron.core.spec import Kind, LayerSpec, ModelSpec, Strategy

__all__ = ["why_not"]


def why_not(model: ModelSpec, kind: LayerSpec, strategy: Strategy) -> str | None:
    """Why the strategy cannot run a layer of that kind; None: it can, or it is a matter of samples or memory."""
    return _undivided(model, kind, strategy) or _unsupported(kind, strategy)


def _undivided(model: ModelSpec, kind: LayerSpec, strategy: Strategy) -> str | None:
    if model.divides(kind, strategy):
        return None
    degree, split = strategy.degree(Kind.TP), kind.tensor_parallel
    odd = [count for count in split.divides if count % degree] if split else []
    if odd:
        return f"{degree} does not divide its {odd[0]} heads, words or channels; 'galvatron models MODEL' shows them"
    if strategy.sequence_parallel and not kind.allows_sequence_parallel(degree):
        lengths = split.sequence_divides if split else ()
        return f"{degree} does not divide its {lengths[0]} tokens, as +sp would" if lengths else "it has no +sp"
    whole = "TP cannot split it" if model.splittable else f"TP can split no layer of {model.name}"
    return kind.context_problem(strategy) or whole


def _unsupported(kind: LayerSpec, strategy: Strategy) -> str | None:
    if strategy.fused_loss and kind.fused_loss is None:
        return "+fl is for a head with a loss over words"
    if strategy.float8 and kind.float8 is None:
        return "it has no products that run in float8"
    if not kind.allows_grade(strategy):
        return "nobody knows what it keeps then; use +rc or keep all"
    if not kind.allows_experts(strategy):
        return "it has no experts" if kind.experts is None else "its experts do not divide"
    return None
