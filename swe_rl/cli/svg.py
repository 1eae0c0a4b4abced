"""Small charts as inline SVG: no script, no font, no file beside the page. Colours come from the page's CSS classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
NUM_COLOURS = 6  # classes c0 to c5


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. A NaN in `y` is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int  # index into the page's palette


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values onto pixels, with round ticks."""

    low: float
    high: float
    pixel_low: float
    pixel_high: float

    def at(self, value: float) -> float:
        return self.pixel_low + (value - self.low) / (self.high - self.low) * (self.pixel_high - self.pixel_low)


def line_chart(title: str, series: Sequence[Series], *, bands: Sequence[str] = ()) -> str:
    """A figure with one line per series; "" when there is nothing to draw.

    bands: labels of equal parts of the x axis instead of numbers; x then runs from 0 to len(bands).
    """
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    x_values = [0.0, float(len(bands))] if bands else [x for x, _ in points]
    x_axis = Axis(*_padded(x_values, share=0.0), LEFT, WIDTH - RIGHT)
    y_axis = Axis(*_padded([y for _, y in points], share=0.06), HEIGHT - BOTTOM, TOP)
    body = [*_y_grid(y_axis), *(_bands(bands, x_axis) if bands else _x_ticks(x_axis))]
    for line in series:
        body += _line(line, x_axis, y_axis)
    shown = {s.label: s.colour for s in series if s.label}
    legend = "".join(f'<span class="key c{c % NUM_COLOURS}">{escape(label)}</span>' for label, c in shown.items())
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    caption = f"<figcaption>{escape(title)} {legend if len(shown) > 1 else ''}</figcaption>"
    return f"<figure>{caption}{svg}</figure>"


def bar_chart(title: str, rows: Sequence[tuple[str, Sequence[float]]], *, keys: Sequence[str]) -> str:
    """Stacked horizontal bars, one per row, each as wide as its share; `keys` name the parts."""
    cells = []
    for label, values in rows:
        total = sum(values) or 1.0
        parts = "".join(
            f'<i class="b{k % NUM_COLOURS}" style="width:{100 * v / total:.2f}%" title="{escape(key)}: {v:g}"></i>'
            for k, (key, v) in enumerate(zip(keys, values, strict=True))
            if v
        )
        cells.append(f'<tr><th>{escape(label)}</th><td class="bar">{parts}</td><td>{sum(values):g}</td></tr>')
    legend = "".join(f'<span class="key c{k % NUM_COLOURS}">{escape(key)}</span>' for k, key in enumerate(keys))
    return f"<figure><figcaption>{escape(title)} {legend}</figcaption><table>{''.join(cells)}</table></figure>"


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten apart) within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_label(value: float) -> str:
    """Short: 1200 as 1.2k, 0.0001 as 1e-4."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}".replace("e-0", "e-")


def _padded(values: Sequence[float], *, share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.5 or 1.0
        return low - margin, high + margin
    return low - share * (high - low), high + share * (high - low)


def _y_grid(y_axis: Axis) -> list[str]:
    lines = []
    for value in ticks(y_axis.low, y_axis.high):
        y = y_axis.at(value)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{tick_label(value)}</text>')
    return lines


def _x_ticks(x_axis: Axis) -> list[str]:
    places = [(x_axis.at(value), tick_label(value)) for value in ticks(x_axis.low, x_axis.high)]
    return [f'<text x="{x:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{label}</text>' for x, label in places]


def _bands(bands: Sequence[str], x_axis: Axis) -> list[str]:
    lines = []
    for index, label in enumerate(bands):
        left, middle = x_axis.at(index), x_axis.at(index + 0.5)
        lines.append(f'<line class="mark" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        lines.append(f'<text x="{middle:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{escape(label)}</text>')
    return lines


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Polylines between gaps; a point on its own becomes a dot."""
    pieces: list[list[str]] = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        if math.isfinite(y):
            pieces[-1].append(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}")
        elif pieces[-1]:
            pieces.append([])
    shapes = []
    for piece in filter(None, pieces):
        colour = f"c{series.colour % NUM_COLOURS}"
        if len(piece) == 1:
            place_x, place_y = piece[0].split(",")
            shapes.append(f'<circle class="{colour}" cx="{place_x}" cy="{place_y}" r="2.5"/>')
        else:
            shapes.append(f'<polyline class="{colour}" points="{" ".join(piece)}"/>')
    return shapes
