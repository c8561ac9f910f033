"""Pack this commit and the packages that a GPU machine without a network may lack, in one archive of some 50 MB.

    .venv/bin/python scripts/gpu_bundle.py bundle.tar.xz               # for the torch of the lock file
    .venv/bin/python scripts/gpu_bundle.py bundle.tar.xz --older-torch # for torch 2.11: avoids names that torch 2.11 lacks
    .venv/bin/python scripts/gpu_bundle.py bundle.tar.xz --kernels DIR # with a cache of scripts/compile_kernels.py

On that machine, with Python 3.12, torch, Triton, transformers and pytest installed:

    tar xJf bundle.tar.xz && bash slime_like_bundle/run.sh --parts guard trainer      # arguments of scripts/gpu_evidence.py

SGLang and Ray are not packed, so parts with engines are skipped. scripts/requirements/gpu.lock has the versions.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from slime_like.printable import visible  # noqa: E402

LOCK = REPOSITORY / "scripts" / "requirements" / "gpu.lock"
PACKAGES = (
    "antlr4-python3-runtime",
    "apache-tvm-ffi",
    "execnet",
    "fla-core",
    "flash-linear-attention",
    "flash-qla",
    "hydra-core",
    "hypothesis",
    "megatron-core",
    "msgspec",
    "omegaconf",
    "psutil",
    "pydantic",
    "pydantic-core",
    "pytest-xdist",
    "sortedcontainers",
    "tilelang",
    "torch-c-dlpack-ext",
    "typing-inspection",
    "z3-solver",
)
UNUSED = ("tilelang/3rdparty/composable_kernel", "bin")  # headers for AMD's GPUs; z3's program
# Files of a kernel cache that no run loads.
INTERMEDIATE = ("*.source", "*.ttir", "*.ttgir", "*.llir", "*.ptx", "*.autotune.json", "lock")
LIMIT = 900  # seconds of an installation or a compression
RUN = """#!/usr/bin/env bash
# Run scripts/gpu_evidence.py with the packages of this folder.
cd "$(dirname "${BASH_SOURCE[0]}")/project" || exit 1
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$PWD:$PWD/plugins:$PWD/../site PYTHONUNBUFFERED=1
if [ -d ../kernels ]; then
    kernels=$(cd ../kernels && pwd)
    python3 -c 'import sys; from pathlib import Path; from slime_like.util.kernel_cache import relocate; relocate(Path(sys.argv[1]))' "$kernels"
    export TRITON_CACHE_DIR=$kernels TILELANG_CACHE_DIR=$kernels/tilelang
fi
exec python3 scripts/gpu_evidence.py "$@"
"""
HOST_CACHE = r"torch\.accelerator\.empty_host_cache\(\)", "torch._C._host_emptyCache()"
# File -> pairs of a pattern, which must match, and its replacement. Remove when no machine with torch 2.11 is of interest.
OLDER_TORCH: dict[str, tuple[tuple[str, str], ...]] = {
    "slime_like/config/schema/collectives.py": (
        (r'    Op\("gather_into_tensor".*\n', ""),
        (r', "(all_gather|reduce_scatter)_single(_coalesced)?"', ","),
        (r'"alltoall_base", "all_to_all_single"', '"alltoall_base",'),
    ),
    "slime_like/distributed/gloo_device.py": (
        (r'( +)c10d\.Backend\._ensure_backend_registered\("gloo"\)', r"\1return"),
    ),
    "slime_like/train/megatron/model/layers.py": (
        (
            r"( +)out = varlen_attn\(",
            r"\1key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))\n\g<0>",
        ),
        (r"(scale=self\.scale,\s+window_size=\(-1, 0\),)\s+enable_gqa=True,", r"\1"),
    ),
    "slime_like/train/megatron/step/optim.py": (HOST_CACHE,),
    "slime_like/train/megatron/trace/memory.py": (HOST_CACHE,),
    "tests/train/parity.py": ((r"dist\.all_gather_single\(", "dist.all_gather_into_tensor("),),
    "plugins/slime_like_plugins/flow_mla/gather.py": ((r"dist\.all_gather_single\(", "dist.all_gather_into_tensor("),),
}


def main(argv: Sequence[str]) -> int:
    """Write the archive and return 0. Raises ``SystemExit`` with the reason if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="file to write")
    parser.add_argument("--older-torch", action="store_true", help="for torch 2.11")
    parser.add_argument("--without-packages", action="store_true", help="the project only")
    parser.add_argument(
        "--kernels", type=Path, metavar="DIR", help="folder of compiled kernels (scripts/compile_kernels.py)"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slime_like-bundle-") as name:
        folder = Path(name) / "slime_like_bundle"
        export_project(folder / "project")
        if args.older_torch:
            edit(folder / "project", OLDER_TORCH)
        if not args.without_packages:
            install(folder / "site", versions(LOCK.read_text()))
        if args.kernels is not None:
            copy_kernels(args.kernels, folder / "kernels")
        (folder / "run.sh").write_text(RUN)
        _run(["tar", "--create", "--xz", f"--file={args.archive.resolve()}", folder.name], cwd=folder.parent)
    sys.stdout.write(visible(f"{args.archive}: {args.archive.stat().st_size / 1e6:.1f} MB\n"))
    return 0


def copy_kernels(cache: Path, folder: Path) -> None:
    """Copy a kernel cache without ``INTERMEDIATE`` files, which no run loads. Raises ``SystemExit`` if it has no kernel."""
    if not any(cache.glob("*/*.cubin")):
        raise SystemExit(
            f"--kernels {cache}: no compiled kernels: run scripts/compile_kernels.py --cache {cache} first"
        )
    shutil.copytree(cache, folder, ignore=shutil.ignore_patterns(*INTERMEDIATE))


def export_project(folder: Path) -> None:
    """Write the files of the current commit, and its hash, which gpu_evidence.py prints."""
    folder.mkdir(parents=True)
    archive = folder.parent / "project.tar"
    _run(["git", "archive", f"--output={archive}", "HEAD"], cwd=REPOSITORY)
    _run(["tar", "--extract", f"--file={archive}"], cwd=folder)
    archive.unlink()
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    (folder / "COMMIT").write_text(head.stdout)


def edit(project: Path, changes: dict[str, tuple[tuple[str, str], ...]]) -> None:
    """Replace the matches of regular expressions in files. Raises ``SystemExit`` naming one that does not match."""
    for file, replacements in changes.items():
        text = (project / file).read_text()
        for pattern, replacement in replacements:
            text, num_replaced = re.subn(pattern, replacement, text)
            if num_replaced == 0:
                raise SystemExit(f"{file} has no {pattern!r}: review OLDER_TORCH of {Path(__file__).name}")
        (project / file).write_text(text)


def versions(lock: str) -> list[str]:
    """Return ``name==version`` of the packages to pack. Raises ``SystemExit`` naming those that the lock file lacks."""
    pinned = {match[1]: match[0] for match in re.finditer(r"^([a-z0-9-]+)==[^ \\\n]+", lock, re.MULTILINE)}
    if missing := [name for name in PACKAGES if name not in pinned]:
        raise SystemExit(f"{LOCK} lacks {', '.join(missing)}: review PACKAGES of {Path(__file__).name}")
    return [pinned[name] for name in PACKAGES]


def install(folder: Path, requirements: Sequence[str]) -> None:
    """Install packages without their dependencies in a folder, and remove the folders of ``UNUSED``."""
    uv = REPOSITORY / ".venv" / "bin" / "uv"
    _run(
        [
            str(uv),
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--python",
            sys.executable,
            "--target",
            str(folder),
            *requirements,
        ]
    )
    for name in UNUSED:
        shutil.rmtree(folder / name)


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, timeout=LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{' '.join(command[:3])} failed: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
