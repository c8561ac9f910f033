"""Short launch scripts: read by the converter, and run by bash for comparison."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell.launch_script import Launch, read_launch
from tests.config.bad_input import refusal

_PYTHON = "python3() { shift; printf '%s\\0' \"$@\"; }\n"  # replaces training when bash runs a script


def read_script(folder: Path, text: str, **variables: str) -> Launch:
    """Read ``text`` as the script run.sh."""
    script = folder / "run.sh"
    script.write_text(text)
    return read_launch(script, variables=variables)


def arguments_in_bash(text: str) -> list[str]:
    """Return the arguments that training gets when bash runs the script."""
    process = subprocess.run(
        ["bash", "--norc"],
        input=(_PYTHON + text).encode(),
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    return process.stdout.decode().split("\0")[:-1]


def assert_read_as_bash_does(text: str, folder: Path) -> None:
    """Assert that training gets the same arguments as when bash runs the script."""
    expected = arguments_in_bash(text)
    values = read_script(folder, text).arguments
    assert [(value.text, value.problem) for value in values] == [(argument, "") for argument in expected]
    assert expected, "bash gave no arguments"


def assert_refused(text: str, words: Sequence[str], folder: Path) -> None:
    """Assert that the script or one of its arguments is refused with a message that contains ``words``."""
    with refusal(words):
        launch = read_script(folder, text)
        raise ConfigError(
            " ".join(f"{value.file_line}: {value.problem}" for value in launch.arguments if value.problem)
        )
