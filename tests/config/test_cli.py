"""``train.py``: exit codes, one message on stderr, and never a traceback for bad input."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from slime_like.config.schema.collectives import OPS, SLIME_SKIPS, canonical
from slime_like.errors import SlimeLikeError, WorkerError
from slime_like.util.deadline import scale

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    """Return ``train.main``, loaded by path because the folder tests/train has the same name."""
    spec = importlib.util.spec_from_file_location("train_entry", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_train_py_is_one_screen() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 40


def test_missing_packages_are_reported_with_the_setup_command(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(ROOT / "train.py"), "--help"]  # -S: no installed package is visible
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * scale(), env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert "is not installed for" in result.stderr
    assert "bash scripts/setup.sh" in result.stderr


def test_train_py_runs_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "+recipe=quickstart", "optim.lrr=1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * scale())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "ConfigError: optim.lrr=1 is unknown: did you mean 'optim.lr'?\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--help"], "+recipe=quickstart"),
        (["--help", "optim"], "optim.lr"),
        (["--cfg", "job", "+recipe=quickstart"], "hf_checkpoint: runs/"),
        (["--plan", "+recipe=quickstart_async"], "max_staleness 1"),
        (["--plan-for", "2xH200", "+recipe=quickstart", "placement.device=cuda"], "2 GPUs (H200)"),
    ],
)
def test_commands_that_only_print_exit_with_0(
    main: Callable[[list[str]], int], argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert words in out
    assert err == ""


def test_the_plan_shows_every_op_under_its_policy(
    main: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["--plan", "+recipe=quickstart", "guard=slime", "guard.groups.tp={checks: below, action: raise}"]
    assert main(argv) == 0
    text = capfd.readouterr().out
    lines = text[text.index("guard      ") :].splitlines()
    assert lines[0].startswith("guard      auto memory, deadline ")
    policies: dict[str, list[str]] = {}
    for line in takewhile(lambda line: line.startswith("  "), lines[1:]):
        if line.startswith("    "):
            policies[next(reversed(policies))] += line.strip().rstrip(",").split(", ")
        else:
            policies[line.strip()] = []
    skipped = [canonical("", name).name for name in SLIME_SKIPS]
    assert {policy: sorted(ops) for policy, ops in policies.items()} == {
        "always: clear below 3 GiB": sorted(op.name for op in OPS if op.name not in skipped),
        "never": sorted(skipped),
        "below: raise below 3 GiB": ["tp: every op"],
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["--plan", "loop.num_rollout=0"],
        ["--lrr", "1"],
        ["model.hf_checkpoint=/no"],
        ["--help", "x"],
        ["--plan-for", "H200"],
        ["--plan-for", "8x3090"],
    ],
)
def test_bad_input_exits_with_2(
    main: Callable[[list[str]], int], argv: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert re.fullmatch(r"ConfigError: [^\n]+\n", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerError("rank 1 died\ncrash bundle: runs/a/crash"), 1),
        (SlimeLikeError("x"), 1),
        (KeyboardInterrupt("stopped"), 130),
    ],
)
def test_a_failed_run_has_another_exit_code_than_bad_input(
    main: Callable[[list[str]], int],
    error: BaseException,
    code: int,
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Errors raised by ``run.prepare``, user code inside a run, count as errors of the run."""
    module = tmp_path / "failing.py"
    module.write_text("def fail(cfg):\n    raise error\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    import failing  # pyright: ignore[reportMissingImports]

    failing.error = error
    assert main([*argv, "run.prepare=failing:fail"]) == code
    assert str(error) in capfd.readouterr().err
