"""Print on one line the versions for a report about a problem: code, Python, packages, CUDA in an image, number of GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from slime_like.printable import visible
from slime_like.util.gpus import installed_gpus

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "flash-linear-attention", "flash-qla")
GIT_S = 10


def versions() -> dict[str, str]:
    """Return a dict from names to versions, with the device and the number of GPUs.

    Missing packages are left out, and so is CUDA if CUDA_VERSION is not set.
    """
    result = {"slime_like": _commit(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if cuda := os.environ.get("CUDA_VERSION"):  # version in the image
        result["cuda"] = cuda
    gpus = installed_gpus()
    return result | {"device": os.environ.get("SLIME_LIKE_DEVICE", "auto"), "gpus": str(len(gpus))}


def _commit() -> str:
    """Return the short hash from git or, if git fails, SLIME_LIKE_COMMIT; "unknown commit" if that is not set."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=GIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SLIME_LIKE_COMMIT", "unknown commit")


def main() -> int:
    """Print the versions; return 0."""
    print(visible(", ".join(f"{name} {version}" for name, version in versions().items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
