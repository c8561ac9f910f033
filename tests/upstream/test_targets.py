"""Every hook and patch finds its target in the installed SGLang, megatron-core and torch.

CI runs the tests marked ``upstream`` with the next version of each (``scripts/next_upstream.sh``); a failure
names the hook or patch that no longer fits. Each is installed as in a run, in a process per package.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine import environment as engine_environment
from tests.upstream import targets

pytestmark = [pytest.mark.upstream, pytest.mark.slow]

ENGINE = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10, deterministic=True)


@functools.cache
def run(*packages: str) -> dict[str, Any]:
    """Run the process that installs the hooks and patches of ``packages``, and return what it prints."""
    environment = engine_environment.child_environment(ENGINE, "/nowhere") if "sglang" in packages else None
    result = subprocess.run(
        [sys.executable, "-m", "tests.upstream.targets", *packages],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def check(package: str, name: str) -> None:
    """Fail with the problem of the hooks, patch or wrapper ``name``, if there is one."""
    problems = run("sglang")[package] if package == "sglang" else run("megatron", "torch")[package]
    assert isinstance(problems, dict), problems
    if problems[name] is not None:
        pytest.fail(f"{package}, {name}: {problems[name]}", pytrace=False)


@pytest.mark.parametrize("hook_set", targets.HOOK_SETS)
def test_hooks_into_sglang(hook_set: str) -> None:
    check("sglang", hook_set)


@pytest.mark.parametrize("module", [*targets.patched_modules(), "every patch"])
def test_patches_of_megatron_core(module: str) -> None:
    check("megatron", module)


@pytest.mark.parametrize("wrapper", targets.WRAPPERS)
def test_wrappers_of_torch(wrapper: str) -> None:
    check("torch", wrapper)
