"""A program on a terminal of ours, and what stood on it: the live view as a user sees it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, LINES = 112, 40
# How rich begins to draw a live view anew: it erases the lines of the one before, going up.
REDRAW = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[=>]|\r")  # all but colours, which end in m
PAGE = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body{{margin:0;padding:16px;background:#26282b;color:{foreground}}}
pre{{margin:0;font:14px/1.35 "DejaVu Sans Mono",monospace}}</style><pre><code>{code}</code></pre>
"""


def on_terminal(command: Sequence[str], environment: Mapping[str, str], watch: Callable[[], None]) -> tuple[int, str]:
    """Run ``command`` on a pseudo-terminal; its exit code, and all that it wrote. ``watch`` is called whenever it writes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environment), start_new_session=True
    )
    os.close(theirs)
    written = io.BytesIO()
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # EIO: the other side is closed
            piece = b""
        if not piece:
            break
        written.write(piece)
        watch()
    os.close(ours)
    return process.wait(), written.getvalue().decode(errors="replace")


def frames(written: str) -> list[str]:
    """What a live view drew, one text with its colours per drawing but the first, oldest first."""
    return [CONTROL.sub("", piece).rstrip() for piece in REDRAW.split(written)[1:]]


def write_page(frame: str, path: Path) -> None:
    """A frame as a page that looks like a terminal and loads nothing."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(frame))
    path.write_text(console.export_html(theme=MONOKAI, code_format=PAGE))
