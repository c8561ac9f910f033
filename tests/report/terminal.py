"""Programs on a pseudo-terminal, and the frames of the live view that they draw."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import selectors
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from slime_like.util.deadline import Deadline

COLUMNS, LINES = 112, 40
RUN_S = 3_600.0
# Start of a redraw of rich's live view: it erases the previous lines, going up.
REDRAW = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[=>]|\r")  # all sequences except colours, which end in m
PAGE = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body{{margin:0;padding:16px;background:#26282b;color:{foreground}}}
pre{{margin:0;font:14px/1.35 "DejaVu Sans Mono",monospace}}</style><pre><code>{code}</code></pre>
"""


def on_terminal(
    command: Sequence[str], environment: Mapping[str, str], watch: Callable[[], None], limit_s: float = RUN_S
) -> tuple[int, str]:
    """Run ``command`` on a pseudo-terminal; return exit code and output. ``watch`` is called after every read.

    Raises ``DeadlineExceeded`` if the command does not end within ``limit_s``, and kills its process group.
    """
    deadline = Deadline("the terminal", "run", limit_s)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=dict(environment), start_new_session=True
    )
    os.close(terminal)
    output = io.BytesIO()
    try:
        while piece := _read(controller, deadline):
            output.write(piece)
            watch()
        code = process.wait(deadline.remaining(command[0]))
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        os.close(controller)
    return code, output.getvalue().decode(errors="replace")


def _read(controller: int, deadline: Deadline) -> bytes:
    """Return the next output; empty at its end. Raises ``DeadlineExceeded``."""
    with selectors.DefaultSelector() as selector:  # select() refuses descriptors above 1023
        selector.register(controller, selectors.EVENT_READ)
        selector.select(deadline.remaining("output"))
    deadline.remaining("output")
    try:
        return os.read(controller, 65536)
    except OSError:  # EIO: the other side is closed
        return b""


def frames(output: str) -> list[str]:
    """Return the frames of a live view after the first, oldest first, with their colours."""
    return [CONTROL.sub("", piece).rstrip() for piece in REDRAW.split(output)[1:]]


def write_page(frame: str, path: Path) -> None:
    """Write a frame as a self-contained page that looks like a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(frame))
    path.write_text(console.export_html(theme=MONOKAI, code_format=PAGE))
