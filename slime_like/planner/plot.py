"""Plots of the planner: stacked bars as text and as SVG, without a plotting library."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from slime_like.planner.table import MemoryTable, gib

COLUMNS = 64  # characters of a text plot, up to the limit or the end of the longest bar
MARKS = string.ascii_lowercase + string.ascii_uppercase
LEGEND = 5  # items of the legend per line
WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 900, 34, 26, 170, 20, 44
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of the plot: the memory of one role, or of several roles together."""

    name: str
    table: MemoryTable


def text_plot(bars: Sequence[Bar], limit: float) -> Iterator[str]:
    """Yield stacked bars, one per row, with a line at ``limit`` bytes, and a legend of the items that are visible."""
    longest = max([limit, *(bar.table.total for bar in bars)])
    edge, margin = round(COLUMNS * limit / longest), max(len(bar.name) for bar in bars)
    marks: dict[str, str] = {}
    for bar in bars:
        line, total = "", 0.0
        for item in bar.table.items:
            total += item.num_bytes
            width = round(COLUMNS * total / longest) - len(line)
            if width > 0:
                mark = marks.setdefault(item.name, MARKS[len(marks) % len(MARKS)])
                line += mark * width
        line = line.ljust(edge)
        yield f"  {bar.name:<{margin}} {line[:edge]}|{line[edge:]} {gib(bar.table.total)}"
    yield f"  {'':<{margin}} {gib(limit):>{edge}}|"
    legend = [f"{mark} {name}" for name, mark in marks.items()]
    for first in range(0, len(legend), LEGEND):
        yield f"  {'':<{margin}} {'  '.join(legend[first : first + LEGEND])}"


def memory_plot(title: str, bars: Sequence[Bar], limit: float) -> str:
    """Return an SVG of stacked bars, one per role, with a line at ``limit`` bytes."""
    names = list(dict.fromkeys(item.name for bar in bars for item in bar.table.items))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    longest = max([limit, *(bar.table.total for bar in bars)]) * 1.02
    legend_rows = -(-len(names) // 4)
    height = TOP + len(bars) * (BAR + GAP) + 24 + legend_rows * 20
    scale = (WIDTH - LEFT - RIGHT) / longest
    body = "".join(_body(bars, limit, scale, colours))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="12" y="24" font-size="16">{escape(title)}</text>{body}</svg>\n'
    )


def _body(bars: Sequence[Bar], limit: float, scale: float, colours: dict[str, str]) -> Iterator[str]:
    y = float(TOP)
    for bar in bars:
        yield f'<text x="12" y="{y + BAR / 2 + 5:.0f}">{escape(bar.name)}</text>'
        x = float(LEFT)
        for item in bar.table.items:
            width = max(0.0, item.num_bytes) * scale
            label = escape(f"{item.name}: {gib(item.num_bytes)}")
            yield (
                f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" fill="{colours[item.name]}">'
                f"<title>{label}</title></rect>"
            )
            x += width
        yield f'<text x="{x - 4:.0f}" y="{y - 4:.0f}" text-anchor="end">{gib(bar.table.total)}</text>'
        y += BAR + GAP
    edge = LEFT + limit * scale
    yield f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="{TOP - 12}" y2="{y - GAP + 8:.0f}" stroke="#c00" stroke-dasharray="5 3"/>'
    yield f'<text x="{edge - 4:.0f}" y="{TOP - 6}" text-anchor="end" fill="#c00">{gib(limit)}</text>'
    for i, (name, colour) in enumerate(colours.items()):
        column, row = i % 4, i // 4
        x, top = 12 + column * 220, y + row * 20
        yield f'<rect x="{x}" y="{top:.0f}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{top + 11:.0f}">{escape(name)}</text>'
