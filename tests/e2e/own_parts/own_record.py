"""Record of the parts that the processes of a run use, in the file ``used.jsonl`` next to this module."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from slime_like.config.schema import names

USED = Path(__file__).with_name("used.jsonl")


@cache
def record(part: str) -> None:
    """Append a line when this process first uses ``part``: the part, the process, and the table of names that it imported."""
    command = Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()
    line = json.dumps({"part": part, "pid": os.getpid(), "command": command, "names": names.__file__})
    with USED.open("a") as file:
        file.write(line + "\n")
