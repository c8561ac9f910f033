"""Self-contained HTML pages: inline style, no script, and a content security policy that forbids loading anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from slime_like.printable import visible

STYLE = (
    """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2126;--dim:#68727c;--rule:#dfe3e7;--box:#f6f7f9;
--c0:#1f6feb;--c1:#d2601a;--c2:#1a8754;--c3:#8e44ad;--c4:#b8860b;--c5:#c0392b;--c6:#0b8a9e;--c7:#6b6f76}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e3e6e9;--dim:#98a2ab;--rule:#2d343a;--box:#1c2125;
--c0:#6aa5ff;--c1:#f0935a;--c2:#55c48c;--c3:#c58be0;--c4:#e0b84a;--c5:#ef7d70;--c6:#55c8da;--c7:#a5abb2}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1320px;padding:24px;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:16px 0 4px}p{margin:4px 0}a{color:inherit}small,.note,.dim{color:var(--dim);font-size:13px}
.grid-of-charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(390px,1fr));gap:14px}
figure{margin:0;padding:10px 12px;background:var(--box);border-radius:8px;min-width:0}figcaption{font-weight:600;font-size:14px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:10.5px;font-family:system-ui,sans-serif}
text.y{text-anchor:end}text.x{text-anchor:middle}line.grid{stroke:var(--rule)}line.mark{stroke:var(--c5);stroke-dasharray:3 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.dot{stroke:none}.legend{font-size:12px;margin:2px 0 0}
"""
    + "".join(
        f"polyline.c{n}{{stroke:var(--c{n})}}circle.c{n},rect.c{n}{{fill:var(--c{n})}}.key.c{n}::before{{background:var(--c{n})}}"
        for n in range(8)
    )
    + """
.key{margin-right:12px;white-space:nowrap}.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
table{border-collapse:collapse;font-size:13px;width:100%}th,td{text-align:left;padding:3px 10px 3px 0;vertical-align:top;border-bottom:1px solid var(--rule)}
th{color:var(--dim);font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
code,.tokens,td.token{font-family:ui-monospace,monospace;font-size:12.5px}td{overflow-wrap:anywhere}td:first-child{min-width:6em}
details{margin:6px 0;padding:8px 12px;background:var(--box);border-radius:8px}summary{cursor:pointer}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75;margin:8px 0}.t{border-radius:3px;padding:1px 0}
.t.prompt{color:var(--dim)}.t.tool{text-decoration:underline dotted}
.d0{background:transparent}.d1{background:color-mix(in srgb,var(--c4) 22%,transparent)}
.d2{background:color-mix(in srgb,var(--c1) 40%,transparent)}.d3{background:color-mix(in srgb,var(--c5) 60%,transparent)}
.good{color:var(--c2)}.bad{color:var(--c5)}
"""
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'none'; form-action 'none'; base-uri 'none'"


def html(value: object) -> str:
    """Escape markup, and the characters that ``visible`` escapes, for use as text or in an attribute."""
    return escape(visible(str(value)), quote=True)


def page(title: str, body: Iterable[str]) -> str:
    """Return the complete document. ``body`` is HTML in which the caller has escaped every value with ``html``."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY, quote=True)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()) -> str:
    """Return an HTML table; every cell is escaped. ``numbers`` are the indices of columns to align to the right."""

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column in numbers else ''}>{html(cell)}</{tag}>" for column, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table></div>"
