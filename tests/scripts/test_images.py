"""The image's Dockerfile and compose file agree with scripts/image_steps.sh, which runs the same steps in a clean root."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from slime_like.cluster.jobs import kubernetes
from slime_like.util.deadline import scale

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "scripts" / "image_steps.sh"
MOUNT = re.compile(r"--mount=\S+ ")


def instructions() -> list[tuple[str, str]]:
    """Return instruction and arguments of each line of the Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def steps_run_in_root() -> list[tuple[str, str]]:
    """Return user and step of each line of ``root()`` and of ``root_system()``, which it calls first, that runs one."""
    first, body = (
        STEPS.read_text().partition(f"\n{name}() {{")[2].partition("\n}\n")[0] for name in ("root_system", "root")
    )
    body = body.replace('root_system "$folder"', first)
    return [(user, step) for user, step in re.findall(r'in_root "\$folder" (\S+) (\w+)', body)]


def test_each_run_line_is_a_step_that_a_clean_root_runs_as_the_same_user() -> None:
    user, steps = "0", list[tuple[str, str]]()
    for name, arguments in instructions():
        if name == "USER":
            user = arguments.partition(":")[0]
        if name == "RUN":
            words = shlex.split(MOUNT.sub("", arguments))
            assert words[:2] == ["bash", "scripts/image_steps.sh"], arguments
            steps.append((user, words[2]))
    user_id = re.search(r"^USER_ID=(\d+)", STEPS.read_text(), re.MULTILINE)
    assert user_id is not None
    assert steps == [("0", "system"), (user_id[1], "dependencies"), (user_id[1], "code")]
    assert [(id_.replace('"$USER_ID"', user_id[1]), step) for id_, step in steps_run_in_root()] == steps


def test_the_image_does_not_run_as_root_and_ends_with_a_command_that_prints_versions() -> None:
    words = instructions()
    assert [arguments for name, arguments in words if name == "USER"][-1] == "10001:10001"
    assert ("ENTRYPOINT", '["bash", "docker/entrypoint.sh"]') in words
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


def test_files_that_an_early_step_needs_are_copied_before_it() -> None:
    copied, early = set[str](), ("setup.sh", "lib", "requirements", "setup.py")
    for name, arguments in instructions():
        if name == "COPY":
            copied |= set(arguments.split()[:-1])
        if name == "RUN" and "dependencies" in arguments:
            assert all(any(path.endswith(part) for path in copied) for part in early), copied


def test_an_unknown_step_and_a_root_that_is_none_are_refused(tmp_path: Path) -> None:
    for arguments, message in (
        ([], "The steps of docker/Dockerfile"),
        (["root", tmp_path], "is no Debian or Ubuntu root"),
        (["root-system", tmp_path], "is no Debian or Ubuntu root"),
    ):
        result = subprocess.run(["bash", STEPS, *arguments], capture_output=True, text=True, timeout=60 * scale())
        assert result.returncode == 2 and message in result.stderr


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
    assert ("WORKDIR", kubernetes.CODE) in instructions()
    lock = (ROOT / "scripts" / "requirements" / "gpu.lock").read_text()
    assert re.search(rf"^ray(\[\w+\])?=={re.escape(kubernetes.RAY_VERSION)} ", lock, re.MULTILINE)
