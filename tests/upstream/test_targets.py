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

ROOT = Path(__file__).parents[2]
ENGINE = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10, deterministic=True)

PRINT_AND_FAIL = """
import sys
from tests.upstream import targets

def fail():
    print("before the error")
    raise ValueError("the reason")

targets.CHECKS["package"] = fail
sys.stdout.write(targets.in_fork("package"))
"""


@functools.cache
def run(*packages: str) -> dict[str, Any] | str:
    """Run the process that installs the hooks and patches of ``packages``. Return what it prints, or its output if it fails."""
    environment = engine_environment.child_environment(ENGINE, "/nowhere") if "sglang" in packages else None
    result = subprocess.run(
        [sys.executable, "-m", "tests.upstream.targets", *packages],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        return f"ended with {result.returncode}\n{result.stdout}{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def check(package: str, name: str) -> None:
    """Fail with the problem of the hooks, patch or wrapper ``name``, if there is one."""
    packages = run("sglang") if package == "sglang" else run("megatron", "torch")
    assert isinstance(packages, dict), packages
    problems = packages[package]
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


def test_the_output_of_a_failed_fork_is_complete() -> None:
    output = subprocess.check_output([sys.executable, "-E", "-c", PRINT_AND_FAIL], cwd=ROOT, text=True)
    assert output.startswith("ended with 1\nbefore the error\n") and output.endswith("ValueError: the reason\n"), output


def test_a_failed_process_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [subprocess.CompletedProcess([], 1, "", "the reason")]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: processes.pop())
    assert run("package") == run("package") == "ended with 1\nthe reason"
