"""Programs on a pseudo-terminal, and the frames of the live view that they draw."""

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
# Start of a redraw of rich's live view: it erases the previous lines, going up.
REDRAW = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[=>]|\r")  # all sequences except colours, which end in m
PAGE = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body{{margin:0;padding:16px;background:#26282b;color:{foreground}}}
pre{{margin:0;font:14px/1.35 "DejaVu Sans Mono",monospace}}</style><pre><code>{code}</code></pre>
"""


def on_terminal(command: Sequence[str], environment: Mapping[str, str], watch: Callable[[], None]) -> tuple[int, str]:
    """Run ``command`` on a pseudo-terminal; return exit code and output. ``watch`` is called after every read."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=dict(environment), start_new_session=True
    )
    os.close(terminal)
    output = io.BytesIO()
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # EIO: the other side is closed
            piece = b""
        if not piece:
            break
        output.write(piece)
        watch()
    os.close(controller)
    return process.wait(), output.getvalue().decode(errors="replace")


def frames(output: str) -> list[str]:
    """Return the frames of a live view after the first, oldest first, with their colours."""
    return [CONTROL.sub("", piece).rstrip() for piece in REDRAW.split(output)[1:]]


def write_page(frame: str, path: Path) -> None:
    """Write a frame as a self-contained page that looks like a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(frame))
    path.write_text(console.export_html(theme=MONOKAI, code_format=PAGE))
