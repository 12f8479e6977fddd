"""What limits leave of a space, and what is wrong with limits that leave nothing."""

from __future__ import annotations

from dataclasses import replace

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Cluster, Kind, ModelSpec, Strategy
from galvatron.core.spec.limits import Limits, Pin
from galvatron.planner.plan.reasons import why_not
from galvatron.planner.space import LONG_SEQUENCE, Space

__all__ = ["limited_space", "parse_forbid", "parse_pins", "pinned"]


def parse_pins(text: str | None) -> tuple[Pin, ...]:
    """``encoder=tp2-dp4,head=dp8`` as pins."""
    pins = []
    for part in _parts(text):
        layer, equals, strategy = (piece.strip() for piece in part.partition("="))
        if not (layer and equals and strategy):
            raise InvalidInput(f"pin: {part!r} given; expected a kind of layer and its strategy, such as encoder=tp8")
        try:
            parsed = Strategy.parse(strategy)
        except InvalidInput as error:
            raise InvalidInput(f"pin: {part!r}: {error}") from None
        if parsed.experts:
            raise InvalidInput(
                f"pin: {part!r} gives experts axes of their own, which cannot be pinned; pin the strategy without "
                "them, or turn them off (--no-expert-parallel)"
            )
        pins.append(Pin(layer=layer, strategy=str(parsed)))
    names = [pin.layer for pin in pins]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"pin: {twice!r} is given two strategies; give one")
    return tuple(pins)


def parse_forbid(text: str | None) -> tuple[str, ...]:
    """``tp:node,sdp`` as what is forbidden."""
    return tuple(dict.fromkeys(part.lower() for part in _parts(text)))


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def limited_space(space: Space, limits: Limits | None, cluster: Cluster) -> Space:
    """The part of a space that the limits leave on a cluster."""
    if not limits:
        return space
    confined = tuple(_confined(each, cluster) for each in limits.forbid)
    return replace(space, confined=confined, degree=limits.pipeline_degree, limits=str(limits))


def _confined(text: str, cluster: Cluster) -> tuple[Kind, int]:
    """The kind of parallelism, and of how many devices the islands are that it must not leave; 1: it is not used."""
    kind, colon, level = text.partition(":")
    if kind not in list(Kind):
        raise InvalidInput(f"forbid: {text!r} given; expected one of {', '.join(Kind)}, and where: tp, tp:node")
    if not colon:
        return Kind(kind), 1
    devices = 1
    for each in cluster.levels:
        devices *= each.units
        if each.name.lower() == level:
            return Kind(kind), devices
    known = ", ".join(each.name for each in cluster.levels) or "none"
    raise InvalidInput(f"forbid: {text!r}: cluster {cluster.name!r} has no level {level!r}; its levels are {known}")


def pinned(limits: Limits | None, model: ModelSpec, space: Space, devices: int) -> tuple[tuple[str, Strategy], ...]:
    """The strategy of each kind of layer that keeps one; what no plan could do is refused."""
    kinds = {kind.name: kind for kind in model.kinds}
    found = []
    for pin in limits.pins if limits else ():
        if pin.layer not in kinds:
            raise InvalidInput(f"pin: {model.name} has no layer {pin.layer!r}; its kinds are {', '.join(kinds)}")
        strategy = Strategy.parse(pin.strategy)
        degrees = space.pipeline_degrees(devices)
        if not any(strategy in space.strategies(devices // degree) for degree in degrees):
            if strategy.context_degree > 1 and not space.switches.context_parallel:
                raise InvalidInput(
                    f"pin: {pin.strategy!r} divides sequences over devices, which is searched by default only for "
                    f"samples of {LONG_SEQUENCE:,} tokens and more; add --context-parallel"
                )
            raise InvalidInput(
                f"pin: {pin.strategy!r} is no strategy of space {space.name!r} in a stage of {devices} devices or a "
                "part of them; 'galvatron strategies' lists those that are"
            )
        if not model.allows(kinds[pin.layer], strategy):
            reason = why_not(model, kinds[pin.layer], strategy)
            raise InvalidInput(f"pin: {pin.strategy!r} cannot run layer {pin.layer!r}: {reason}")
        if not model.attends(strategy):
            raise InvalidInput(
                f"pin: {pin.strategy!r} for layer {pin.layer!r} divides sequences as no layer with attention can, so "
                "that no search has it; pin other axes of ring and ulysses"
            )
        found.append((pin.layer, strategy))
    return tuple(found)
