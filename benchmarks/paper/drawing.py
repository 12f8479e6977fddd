"""Plain SVG: plans as the paper draws them, and bars. Text written by hand, so that nothing needs to be installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from galvatron.core.spec import LayerSpec
from galvatron.core.units import format_bytes
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import layer_runs

__all__ = ["Bars", "bars", "draw_plan"]

_FONT = 'font-family="sans-serif" font-size="12"'
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")
_BOX = "#f5d76e"
"""The paper draws layers as yellow rectangles."""
_LARGEST, _SMALLEST = 90.0, 14.0
"""Sides of a layer's rectangle, in pixels."""
_GAP, _NARROWEST = 14.0, 200.0
"""Between layers, and of a stage: what is written below it needs as much."""


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_FONT} {extra}>{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {style}>{inside}</rect>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


# ----------------------------------------------------------------------------------------------------------- plans


def draw_plan(plan: Plan, title: str) -> str:
    """A frame a stage; in it a rectangle for each run of equal layers, as wide as their activations and as high as
    their parameters (by area's root, so that small ones are seen), with the strategy above and ×N below."""
    kinds = {kind.name: kind for kind in plan.model.kinds}
    widest = max(kind.activation_bytes for kind in kinds.values())
    highest = max(kind.parameters for kind in kinds.values())
    parts = [_text(10, 20, title, "start", 'font-weight="bold"')]
    x, bottom = 10.0, 60 + _LARGEST
    for number, stage in enumerate(plan.stages):
        begin = x
        x += _GAP
        for layer, count in layer_runs(stage.layers):
            kind = kinds[layer.layer]
            width, height = _side(kind.activation_bytes, widest), _side(kind.parameters, highest)
            slot = max(width, 7.0 * max(len(layer.strategy), len(layer.layer)))
            middle = x + slot / 2
            hint = f"{layer.layer}: {kind.parameters / 1e6:.1f} M parameters, {_mb(kind)} MB of activations a sample"
            style = f'fill="{_BOX}" stroke="#444"'
            parts += [
                _rectangle(middle - width / 2, bottom - height, width, height, style, hint),
                _text(middle, bottom - height - 6, layer.strategy),
                _text(middle, bottom + 16, f"×{count}"),
                _text(middle, bottom + 32, layer.layer, extra='fill="#666"'),
            ]
            x += slot + _GAP
        devices = f"GPU {stage.devices[0]}–{stage.devices[-1]}" if len(stage.devices) > 1 else f"GPU {stage.devices[0]}"
        parts.append(_rectangle(begin, 32, x - begin, bottom + 28, 'fill="none" stroke="#999" stroke-dasharray="4"'))
        x = max(x, begin + _NARROWEST)
        told = f"stage {number} · {devices} · {format_bytes(stage.memory_bytes)}"
        parts.append(_text((begin + x) / 2, bottom + 52, told))
        x += _GAP
    return _svg(max(x, 8.0 * len(title)), bottom + 70, parts)


def _side(value: float, largest: float) -> float:
    return max(_LARGEST * (value / largest) ** 0.5, _SMALLEST) if largest else _SMALLEST


def _mb(kind: LayerSpec) -> str:
    return f"{kind.activation_bytes / 1e6:.1f}"


# ------------------------------------------------------------------------------------------------------------ bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """One group of bars."""

    name: str
    values: tuple[float | str, ...]
    """A text stands where there is no bar."""


def bars(title: str, groups: Sequence[Bars], series: Sequence[str], unit: str) -> str:
    """Bars in groups, one bar a series, with a legend."""
    top = max((value for group in groups for value in group.values if not isinstance(value, str)), default=1.0)
    bar, height, base = 18.0, 180.0, 230.0
    parts, x = [_text(10, 20, title, "start", 'font-weight="bold"')], 30.0
    for group in groups:
        begin = x
        for place, value in enumerate(group.values):
            if isinstance(value, str):
                parts.append(_text(x + bar / 2, base - 4, value, extra=_turned(x + bar / 2, base - 4)))
            else:
                long = height * value / top
                style = f'fill="{_COLOURS[place % len(_COLOURS)]}"'
                parts.append(_rectangle(x, base - long, bar - 2, long, style, f"{series[place]}: {value:.2f} {unit}"))
                above = base - long - 4
                parts.append(_text(x + bar / 2, above, f"{value:.1f}", extra=_turned(x + bar / 2, above)))
            x += bar
        parts.append(_text((begin + x) / 2, base + 18, group.name))
        x += 2 * bar
    width = max(x, 30.0 + 130 * min(len(series), 4))
    for place, name in enumerate(series):
        column, row = place % 4, place // 4
        left, down = 30 + 130 * column, base + 36 + 18 * row
        parts.append(_rectangle(left, down - 9, 10, 10, f'fill="{_COLOURS[place % len(_COLOURS)]}"'))
        parts.append(_text(left + 15, down, name, "start"))
    parts.append(f'<line x1="24" y1="{base}" x2="{width - 10:.1f}" y2="{base}" stroke="#444"/>')
    return _svg(width, base + 50 + 18 * ((len(series) - 1) // 4), parts)


def _turned(x: float, y: float) -> str:
    """Upwards, so that figures of neighbouring bars do not touch; its start stands on the bar."""
    return f'transform="rotate(-90 {x:.1f} {y:.1f}) translate(14 4)" fill="#444"'
