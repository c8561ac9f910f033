"""Run bash code with the functions of scripts/lib."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from slime_like.util.deadline import scale

ROOT = Path(__file__).parents[2]
LIBRARIES = ("common", "platform", "find_python", "package_index")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def bash(code: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after sourcing the libraries, in an environment of ``env`` and a plain PATH only."""
    load = "".join(f"source '{ROOT}/scripts/lib/{name}.sh'\n" for name in LIBRARIES)
    return subprocess.run(
        ["/bin/bash", "-c", load + code, "setup.sh"],
        env={"PATH": SYSTEM_PATH, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60 * scale(),
    )


def executable(path: Path, text: str) -> Path:
    """Write ``text`` as an executable file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
