"""Line charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime_like.report.page import html

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 190, 58, 24, 12, 10
MAX_POINTS = 1000  # per line
MAX_VALUE = 1e300  # larger values are not drawn, so that ranges are finite
NUM_COLOURS = 8  # classes c0..c7 of the page's style


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) ordered by x; a y that is not finite, or beyond ``MAX_VALUE`` in magnitude, leaves a gap.

    A line of more than ``MAX_POINTS`` is thinned, and shows a gap only if it spans a whole interval of ``_thin``.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


def chart(title: str, series: Sequence[Series], *, unit: str = "", note: str = "", mark: float | None = None) -> str:
    """Return an HTML figure: an SVG chart of ``series`` over steps, or "no value" if there is nothing to draw.

    It has a legend if it shows several series; ``mark`` is a step to highlight.
    """
    lines = [line for line in series if any(_is_drawn(y) for _, y in line.points)]
    head = f"<figcaption>{html(title)}{f' <small>{html(unit)}</small>' if unit else ''}</figcaption>"
    if not lines:
        return f"<figure>{head}<p class=note>no value</p></figure>"
    legend = "".join(f'<span class="key c{s.colour % NUM_COLOURS}">{html(s.name)}</span> ' for s in lines)
    body = "".join(_lines(lines, mark))
    name = html(f"{title}: {', '.join(s.name for s in lines)}")
    return (
        f'<figure>{head}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{body}</svg>'
        f"{f'<p class=legend>{legend}</p>' if len(lines) > 1 else ''}"
        f"{f'<p class=note>{html(note)}</p>' if note else ''}</figure>"
    )


def ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return about ``max_ticks`` round numbers in ``[low, high]``; only ``low`` if ``high`` is not larger."""
    if not high > low:
        return [low]
    raw = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw), raw)
    first = math.ceil(low / step)
    return [index * step for index in range(first, first + max_ticks + 2) if index * step <= high + step * 1e-9]


def number(value: float) -> str:
    """Format a value with few digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"


def _is_drawn(y: float) -> bool:
    return math.isfinite(y) and abs(y) <= MAX_VALUE


def _lines(series: Sequence[Series], mark: float | None) -> Iterator[str]:
    points = [(x, y) for line in series for x, y in line.points if _is_drawn(y)]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    pad = (y_high - y_low) * 0.05 or abs(y_high) * 0.05 or 1.0
    y_low, y_high = y_low - pad, y_high + pad

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - x_low) / (x_high - x_low) if x_high > x_low else 0.5)

    def at_y(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - y_low) / (y_high - y_low))

    for y in ticks(y_low, y_high):
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>'
        yield f'<text class="y" x="{LEFT - 6}" y="{at_y(y) + 3.5:.1f}">{number(y)}</text>'
    for x in ticks(x_low, x_high, 6):
        yield f'<text class="x" x="{at_x(x):.1f}" y="{HEIGHT - 6}">{number(x)}</text>'
    if mark is not None and x_low <= mark <= x_high:
        yield f'<line class="mark" x1="{at_x(mark):.1f}" x2="{at_x(mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    for line in series:
        colour = f"c{line.colour % NUM_COLOURS}"
        for piece in _pieces(_thin(line.points)):
            if len(piece) > 1:
                path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in piece)
                yield f'<polyline class="line {colour}" points="{path}"/>'
        for x, y in line.points if len(line.points) <= 80 else line.points[-1:]:
            if _is_drawn(y):
                label = html(f"{line.name} at {number(x)}: {y!r}")
                yield f'<circle class="dot {colour}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2"><title>{label}</title></circle>'


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points or, if more than ``MAX_POINTS``, the minimum and maximum of each interval, which keeps spikes."""
    size = -(-len(points) // (MAX_POINTS // 2))
    if size <= 2:
        return list(points)
    thinned_points: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        interval = [point for point in points[start : start + size] if _is_drawn(point[1])] or [points[start]]
        thinned_points += sorted({min(interval, key=lambda p: p[1]), max(interval, key=lambda p: p[1])})
    return thinned_points


def _pieces(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the parts of a line between its gaps: each sequence of consecutive points that can be drawn."""
    piece: list[tuple[float, float]] = []
    for point in points:
        if _is_drawn(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece
