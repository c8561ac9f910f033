"""Every hook and patch finds what it takes the place of in the installed SGLang, megatron-core and torch.

CI runs the tests marked ``upstream`` with the next version of each (``scripts/next_upstream.sh``); what fails here names the
hook or patch that no longer fits. Each is put in place as a run does, in a process that nothing else has touched.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine import environment as engine_environment
from tests.upstream import targets

pytestmark = [pytest.mark.upstream, pytest.mark.slow]

ENGINE = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10, deterministic=True)


@functools.cache
def run(package: str) -> subprocess.CompletedProcess[str]:
    """The process that puts the touch-ups of ``package`` in place."""
    environment = engine_environment.child_environment(ENGINE, "/nowhere") if package == "sglang" else None
    return subprocess.run(
        [sys.executable, "-m", "tests.upstream.targets", package],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def check(package: str, touch_up: str) -> None:
    """Fail with the problem of ``touch_up``, if it has one."""
    done = run(package)
    assert done.returncode == 0, done.stderr
    problem: str | None = json.loads(done.stdout.splitlines()[-1])[touch_up]
    if problem is not None:
        pytest.fail(f"{package}, {touch_up}: {problem}", pytrace=False)


@pytest.mark.parametrize("seam", targets.SEAMS)
def test_hooks_into_sglang(seam: str) -> None:
    check("sglang", seam)


@pytest.mark.parametrize("module", [*targets.patched_modules(), "every patch"])
def test_patches_of_megatron_core(module: str) -> None:
    check("megatron", module)


@pytest.mark.parametrize("touch_up", targets.TOUCH_UPS)
def test_touch_ups_of_torch(touch_up: str) -> None:
    check("torch", touch_up)
