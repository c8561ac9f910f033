"""Secrets of a run that strangers could read: on a command line, or in a file of its folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PLANTED = {"WANDB_API_KEY": "planted-a5c1e7", "HF_TOKEN": "planted-93bd20"}  # environment of every run
NAMES = (*PLANTED, "RAY_AUTH_TOKEN")
ENGINE_KEY = re.compile(rb"""api_key['"]?[=:] ?['"](?!\*\*\*['"])[\w-]+""")  # as SGLang logs it
LARGEST = 2**22  # bytes of a file that is searched: weights are larger, or hold no text


@dataclass(slots=True)
class Secrets:
    """The secrets of a run, by the environments of its processes, and where they were seen."""

    values: dict[bytes, str] = field(default_factory=dict[bytes, str])  # to their names
    told: set[str] = field(default_factory=set[str])

    def look(self, pids: Iterable[int]) -> None:
        """Note the secrets of these processes, and which of them stand on a command line."""
        for pid in pids:
            with suppress(OSError):  # it has ended
                for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    if value and name.decode(errors="replace") in NAMES:
                        self.values[value] = name.decode()
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                self.told |= {f"{name} on a command line" for value, name in self.values.items() if value in command}

    def in_files(self, folder: Path) -> list[str]:
        """Complaints about files below ``folder`` that hold a secret, of an engine as well."""
        found: list[str] = []
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_size <= LARGEST:
                data = path.read_bytes()
                found += [f"{name} in {path}" for value, name in self.values.items() if value in data]
                found += [f"the key of an engine in {path}"] * bool(ENGINE_KEY.search(data))
        return found
