"""Resource limits that would end a run midway are reported before it starts."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slime_like.cluster.start import limits
from slime_like.util.deadline import scale
from tests.e2e.runs import REPOSITORY

CHECK = """
import sys
from slime_like.cluster.start.limits import check_limits
from slime_like.errors import ConfigError
try:
    check_limits("cpu")
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("--nofile=256:256", r"^ulimit -n is 256: .*`ulimit -n 65536` first$"),
        (
            "--fsize=1048576",
            r"^ulimit -f is 1024 kB: a file of checkpoints, or of Ray's object store .*`ulimit -f unlimited` first$",
        ),
        ("--as=8589934592", r"^ulimit -v is 8388608 kB: Ray maps 16 GiB.*`ulimit -v unlimited` first$"),
        ("--nofile=256:4096", "^$"),  # the run may raise the soft limit itself
    ],
)
def test_a_low_limit_is_named(limit: str, message: str) -> None:
    command = ["prlimit", limit, sys.executable, "-c", CHECK]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60 * scale())
    assert re.search(message, result.stderr.strip()), result.stderr
    assert result.returncode == (message != "^$")


def test_a_tiny_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    (problem,) = limits.limits_too_low("cpu")
    assert problem.startswith("/dev/shm has 1.0 MiB free, a run needs 16: ")
    assert "--shm-size" in problem


def test_cuda_needs_unlimited_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda n: (2**40, 2**40) if n == resource.RLIMIT_AS else real(n))
    assert list(limits.limits_too_low("cpu")) == []
    (problem,) = limits.limits_too_low("cuda")
    assert "CUDA reserves terabytes of addresses" in problem


def test_open_files_that_a_run_can_raise_are_not_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reads the limits without raising the soft limit of open files, as a run does."""
    real = resource.getrlimit
    files = [512, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda n: tuple(files) if n == resource.RLIMIT_NOFILE else real(n))
    assert list(limits.limits_too_low("cpu")) == []
    files[1] = 1000
    (problem,) = limits.limits_too_low("cpu")
    assert problem.startswith("ulimit -n is 1000: ")
