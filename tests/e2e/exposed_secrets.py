"""Secrets of a run that other users could read: on a command line, or in a file of the run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PLANTED_SECRETS = {"WANDB_API_KEY": "planted-a5c1e7", "HF_TOKEN": "planted-93bd20"}  # in the environment of every run
SECRET_NAMES = (*PLANTED_SECRETS, "RAY_AUTH_TOKEN")
ENGINE_KEY = re.compile(rb"""api_key['"]?[=:] ?['"](?!\*\*\*['"])[\w-]+""")  # as SGLang logs the key
MAX_FILE_BYTES = 2**22  # larger files are not searched: they hold weights, no text


@dataclass(slots=True)
class ExposedSecrets:
    """Secrets in the environments of a run's processes, and the places where other users could read them."""

    values: dict[bytes, str] = field(default_factory=dict[bytes, str])  # secret -> name of its variable
    exposures: set[str] = field(default_factory=set[str])

    def record(self, pids: Iterable[int]) -> None:
        """Record the secrets of these processes and the command lines that contain one."""
        for pid in pids:
            with suppress(OSError):  # the process has ended
                environment = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0")  # a title may leave many zeros
                for entry in environment.split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    if value and name.decode(errors="replace") in SECRET_NAMES:
                        self.values[value] = name.decode()
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                self.exposures |= {
                    f"{name} on a command line" for value, name in self.values.items() if value in command
                }

    def in_files(self, folder: Path) -> list[str]:
        """Return a complaint for each file below ``folder`` that contains a secret or an engine's key."""
        complaints: list[str] = []
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                data = path.read_bytes()
                complaints += [f"{name} in {path}" for value, name in self.values.items() if value in data]
                complaints += [f"the key of an engine in {path}"] * bool(ENGINE_KEY.search(data))
        return complaints
