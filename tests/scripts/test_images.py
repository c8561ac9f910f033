"""The image's Dockerfile and compose file, and the script that executes the Dockerfile in a clean root."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import image_root  # pyright: ignore[reportAttributeAccessIssue]  scripts is not a package
from slime_like.cluster.jobs import kubernetes
from slime_like.util.deadline import scale

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "scripts" / "image_steps.sh"
IMAGE_ROOT = (sys.executable, ROOT / "scripts" / "image_root.py")
LINES = image_root.instructions(image_root.DOCKERFILE.read_text())
OWNER = f"{os.getuid()}:{os.getgid()}"


def test_each_run_line_is_a_step_of_the_user_that_it_names() -> None:
    user, steps = "0", list[tuple[str, str]]()
    for line in LINES:
        if line.name == "USER":
            user = line.arguments.partition(":")[0]
        if line.name == "RUN":
            words = shlex.split(line.arguments)
            assert words[:2] == ["bash", "scripts/image_steps.sh"], line
            steps.append((user, words[2]))
    user_id = re.search(r"^USER_ID=(\d+)", STEPS.read_text(), re.MULTILINE)
    assert user_id is not None
    assert steps == [("0", "system"), (user_id[1], "dependencies"), (user_id[1], "code")]


def test_the_image_does_not_run_as_root_and_ends_with_a_command_that_prints_versions() -> None:
    assert [line.arguments for line in LINES if line.name == "USER"][-1] == "10001:10001"
    assert [line.arguments for line in LINES if line.name == "ENTRYPOINT"] == ['["bash", "docker/entrypoint.sh"]']
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "print_versions.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120 * scale(),
    )
    assert re.match(
        r"slime_like \S+.*, python 3\.12\.\d+, torch \d.*, megatron-core \d.*, sglang \d.*, ray \d", result.stdout
    )


def test_files_that_an_early_step_needs_are_copied_before_it(tmp_path: Path) -> None:
    image = image_root.Image({"DEVICE": "cpu"}, folder="/code")
    for line in LINES:
        if line.name == "RUN" and "dependencies" in line.arguments:
            break
        if line.name == "COPY":
            image_root.copy(image_root.Instruction("COPY", {"chown": OWNER}, line.arguments), image, tmp_path)
    copied = {str(path.relative_to(tmp_path / "code")) for path in tmp_path.rglob("*") if path.is_file()}
    needed = {"setup.py", "scripts/setup.sh", "scripts/image_steps.sh", "scripts/lib/common.sh"}
    assert needed <= copied and "train.py" not in copied, copied


def test_an_unknown_step_and_a_root_that_is_none_are_refused(tmp_path: Path) -> None:
    for command, code, message in (
        (["bash", STEPS], 2, "The steps of docker/Dockerfile"),
        ([*IMAGE_ROOT, tmp_path], 1, "is not a Debian or Ubuntu root"),
        ([*IMAGE_ROOT, tmp_path, "--device", "gpu", "--", "a", "--plan"], 1, "is not a Debian or Ubuntu root"),
    ):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60 * scale())
        assert result.returncode == code and message in result.stderr


def test_lines_of_a_dockerfile_are_read_as_an_image_builder_reads_them(tmp_path: Path) -> None:
    text = "FROM a AS b\nRUN left out\nFROM b\nARG DEVICE\nENV A=1 \\\n  B=${DEVICE}2\nENV C=${A}3\nWORKDIR /x/y\nUSER 5:6\n"
    text += 'ARG E="a b"\nENV D=${E}\n'
    options = image_root.Options(tmp_path, "gpu", None, None, bytecode=True)
    image = image_root.build(image_root.instructions(text), options)
    assert {name: image.environment[name] for name in "ABCD"} == {"A": "1", "B": "gpu2", "C": "13", "D": "a b"}
    assert (image.user, image.folder) == ("5:6", "/x/y") and (tmp_path / "x" / "y").is_dir()
    for line, message in (
        ("COPY missing.py ./", "has no such file"),
        ("VOLUME /data", "is not supported"),
        ("ENV A=/x:$MISSING", r"ENV A=/x:\$MISSING: no line above defines MISSING"),
        ("ENV A=${B:-1}", r"ENV A=\${B:-1}: .*write \$NAME or \${NAME}"),
    ):
        with pytest.raises(image_root.ImageError, match=message):
            image_root.build(image_root.instructions(f"FROM a\n{line}\n"), options)


def test_each_line_of_the_dockerfile_is_supported(tmp_path: Path) -> None:
    settings = [line for line in LINES if line.name not in ("RUN", "COPY")]
    image = image_root.build(settings, image_root.Options(tmp_path, "cpu", None, None, bytecode=True))
    assert image.environment["SLIME_LIKE_DEVICE"] == "cpu"
    assert image.environment["SLIME_LIKE_COMMIT"] == "unknown commit"


def test_the_build_context_is_what_git_and_dockerignore_leave() -> None:
    names = image_root.context()
    assert {"train.py", "docker/entrypoint.sh", "scripts/requirements/cpu.lock"} <= set(names)
    patterns = ("runs", "**/__pycache__", "**/*.egg-info")
    excluded = ("runs/a", "__pycache__/a", "a/__pycache__/b.pyc", "a/b.egg-info/c")
    assert all(image_root.excluded(name, patterns) for name in excluded)
    assert not any(image_root.excluded(name, patterns) for name in ("a/runs", "runs.py", "a/b.py"))


def test_the_compose_file_publishes_only_on_loopback_and_requires_a_token() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = compose["services"]
    assert services["head"]["ports"] == ["127.0.0.1:8265:8265"] and "ports" not in services["worker"]
    for service in services.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert service["build"]["dockerfile"] == "docker/Dockerfile"
        assert "privileged" not in service and service["cap_drop"] == ["ALL"]


def test_generated_files_use_the_images_folder_and_version_of_ray() -> None:
    assert [line.arguments for line in LINES if line.name == "WORKDIR"] == [kubernetes.CODE]
    lock = (ROOT / "scripts" / "requirements" / "gpu.lock").read_text()
    assert re.search(rf"^ray(\[\w+\])?=={re.escape(kubernetes.RAY_VERSION)} ", lock, re.MULTILINE)
