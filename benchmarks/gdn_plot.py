"""A line plot on logarithmic axes as SVG: for documentation, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 380, 70, 50, 30, 110
COLOURS = ("#1f6fb2", "#c44e52", "#4c9a52", "#8a63b0", "#b58900")
Line = Sequence[tuple[float, float]]


def plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> str:
    """Return an SVG plot of at most ten named ``lines``, each with one point or more; coordinates are above 0."""
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    x_at = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_at = _Axis(min(ys) / 1.3, max(ys) * 1.3, HEIGHT - BOTTOM, TOP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    ]
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out.append(f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>')
    for x in sorted(set(xs)):
        out.append(f'<text x="{x_at(x):.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
        out.append(_segment(x_at(x), TOP, x_at(x), HEIGHT - BOTTOM))
    for power in range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1):
        for y in (10.0**power, 3 * 10.0**power):
            if min(ys) / 1.3 <= y <= max(ys) * 1.3:
                out.append(f'<text x="{LEFT - 6}" y="{y_at(y) + 4:.0f}" text-anchor="end">{y:g}</text>')
                out.append(_segment(LEFT, y_at(y), WIDTH - RIGHT, y_at(y)))
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>'
    )
    out.append(
        f'<text transform="translate(16,{HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    for colour, (name, line) in zip(COLOURS * 2, lines.items(), strict=False):
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        end = line[-1]
        out.append(f'<text x="{x_at(end[0]) + 8:.0f}" y="{y_at(end[1]) + 4:.0f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _segment(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


class _Axis:
    """Logarithmic axis that maps values to pixels."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._first, self._length = first, last - first

    def __call__(self, value: float) -> float:
        return self._first + (math.log(value) - self._low) / self._span * self._length
