"""Scripts: they parse, documents name existing scripts, and the summary matches metrics.jsonl."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import summarize_run  # pyright: ignore[reportAttributeAccessIssue]  scripts is not a package
from tests.scripts.shell import ROOT, bash, executable

SCRIPTS = sorted([*ROOT.glob("scripts/**/*.sh"), ROOT / ".ci" / "run"])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docker/*")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_parses(script: Path) -> None:
    result = subprocess.run(["/bin/bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_ci_is_the_test_script() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith('exec bash scripts/test.sh "$@"')


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_name_files_that_exist(document: Path) -> None:
    text = document.read_text()
    commands = re.findall(r"(?:bash|python) ((?:scripts|benchmarks)/[\w./-]+|train\.py)", text) + re.findall(
        r"(?:-f|COPY) (docker/\S+|scripts/\S+)", text
    )
    assert not [name for name in commands if not (ROOT / name.rstrip(".")).exists()]


def test_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "bash scripts/quickstart.sh" in readme and "bash scripts/test.sh" in readme


@pytest.mark.parametrize(
    ("env", "config", "expected"),
    [
        ({}, ":env:.index-url='https://a/simple'", "https://a/simple"),
        ({}, "global.index-url='https://b/simple'", "https://b/simple"),
        ({}, "global.index-url='https://b/simple'\n:env:.index-url='https://a/simple'", "https://a/simple"),
        ({"UV_DEFAULT_INDEX": "https://c"}, "global.index-url='https://b/simple'", "https://c"),
        ({"UV_INDEX_URL": "https://d"}, "global.index-url='https://b/simple'", "https://d"),
        ({}, "", "unset"),
    ],
)
def test_uv_gets_the_index_of_pip_unless_it_has_its_own(
    tmp_path: Path, env: dict[str, str], config: str, expected: str
) -> None:
    python = executable(tmp_path / "python", f"#!/bin/sh\ncat <<'END'\n{config}\nEND\n")
    result = bash(f"PYTHON='{python}'\nuse_pip_settings\necho ${{UV_DEFAULT_INDEX-unset}}", env)
    assert result.stdout == f"{expected}\n", result.stderr


def test_a_failing_step_ends_the_script_with_its_name() -> None:
    result = bash("step 'doing this' false\necho after")
    assert result.returncode == 1
    assert "after" not in result.stdout
    assert "setup: doing this failed after" in result.stderr


def test_summary_prints_first_and_last_accuracy(tmp_path: Path) -> None:
    rows = [{"step": 0, "eval/arithmetic": 0.31}, {"step": 1}, {"step": 7, "eval/arithmetic": 0.92}, {"step": 8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--qwen-gdn-backend", "torch", "--lr=1e-5")
    command = [sys.executable, "scripts/summarize_run.py", "+recipe=quickstart", *flags, f"run.dir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "held-out accuracy (eval/arithmetic): 0.310 after the warm start, 0.920 after 7 rollouts\n"
    assert result.returncode == 0


def test_a_run_without_accuracy_has_no_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["+recipe=quickstart", f"run.dir={tmp_path}"]
    assert summarize_run.main(command) == 1
    assert "metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert summarize_run.main(command) == 1
    assert "no eval/arithmetic" in capsys.readouterr().err
    assert summarize_run.main([*command, "--plan"]) == 0  # --plan runs nothing to summarize
