"""Workflows and forms of the forge: they parse, and name existing scripts, parts, packages and versions."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.mark.expression import Expression

from tests.scripts.shell import ROOT, bash
from tests.scripts.test_locks import lines, pins

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
FILES = [*WORKFLOWS, *FORMS, ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml"]
MARKERS = ("engine", "ranks", "e2e", "gpu")
SCRIPT = re.compile(r"(?:^|\s)((?:\.ci|scripts)/[\w./-]+)((?: +[\w-]+)*)")  # followed by plain arguments


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def parts() -> Mapping[str, str]:
    """Return the mark expression of each part of the tests."""
    result = bash(
        f"source '{ROOT}/scripts/lib/parts.sh'\n" + 'for p in "${!PARTS[@]}"; do echo "$p:${PARTS[$p]}"; done'
    )
    return dict(line.split(":") for line in result.stdout.splitlines())


def commands(workflow: Path) -> Sequence[str]:
    """Return the ``run:`` of each step, once for each value of its job's matrix."""
    result: list[str] = []
    for job in load_yaml(workflow)["jobs"].values():
        matrix: dict[str, list[str]] = job.get("strategy", {}).get("matrix", {})
        for step, values in itertools.product(job["steps"], itertools.product(*matrix.values())):
            text: str = step.get("run", "")
            for name, value in zip(matrix, values, strict=True):
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            result.append(text)
    return result


def selects(expression: Expression, markers: Sequence[str]) -> bool:
    """Return True if ``-m`` with this expression runs a test that has these markers."""
    return expression.evaluate(lambda name, /, **_: name in markers)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_yaml_mappings(path: Path) -> None:
    assert isinstance(load_yaml(path), dict)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_commands_name_existing_scripts_and_parts(workflow: Path) -> None:
    scripts = [match for command in commands(workflow) for match in SCRIPT.findall(command)]
    assert scripts
    for script, arguments in scripts:
        assert os.access(ROOT / script, os.X_OK), f"{workflow.name} runs {script}"
        option, _, part = arguments.strip().partition(" ")
        if script == ".ci/run":
            assert option == "--part" and part in {*parts(), "static"}, f"{workflow.name} runs {script}{arguments}"


def test_ci_runs_every_part_that_needs_no_gpu() -> None:
    run = {
        part for command in commands(GITHUB / "workflows" / "ci.yml") for part in re.findall(r"--part (\w+)", command)
    }
    assert run == {*parts(), "static"} - {"gpu"}


def test_each_test_is_in_one_part() -> None:
    expressions = {part: Expression.compile(text) for part, text in parts().items()}
    for size in range(len(MARKERS) + 1):
        for markers in itertools.combinations(MARKERS, size):
            matching_parts = [part for part, expression in expressions.items() if selects(expression, markers)]
            assert len(matching_parts) == 1, f"a test marked {markers} is in {matching_parts}"


@pytest.mark.parametrize("argument", ["", "lint", "unit tests/algo"])
def test_an_unknown_part_is_refused_with_the_list(argument: str) -> None:
    result = bash(f"bash '{ROOT}/scripts/test.sh' --part {argument}")
    assert result.returncode == 1
    assert "give one of static, unit, engine, ranks, e2e, gpu" in result.stderr
    assert all(part in result.stderr for part in parts())


def test_nightly_packages_are_pinned_and_known() -> None:
    packages: list[str] = load_yaml(GITHUB / "workflows" / "nightly.yml")["jobs"]["upstream"]["strategy"]["matrix"][
        "package"
    ]
    exact = {line.partition("==")[0] for line in lines(ROOT / "scripts/requirements/runtime.in") if "==" in line}
    upgrade = bash(f"bash '{ROOT}/scripts/next_upstream.sh' numpy")
    assert upgrade.returncode == 1 and "unknown package 'numpy'" in upgrade.stderr
    assert set(packages) <= exact
    assert set(packages) == set(re.findall(r"[\w-]+", upgrade.stderr.partition("give ")[2])) - {"or"}


def test_pins_agree_with_the_locks() -> None:
    (ruff,) = load_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{pins('cpu')['ruff']}", (
        "scripts/lock.sh has moved ruff: set rev of .pre-commit-config.yaml"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    python = {
        step["with"]["python-version"]
        for workflow in WORKFLOWS
        for job in load_yaml(workflow)["jobs"].values()
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    }
    assert python == {project["tool"]["basedpyright"]["pythonVersion"]}
    assert load_yaml(ROOT / "CITATION.cff")["version"] == version("slime-like")
