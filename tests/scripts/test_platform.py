"""Platform checks: unsupported machines are refused before a download, and the device follows the driver."""

from __future__ import annotations

import pytest

from tests.scripts.shell import bash

GOOD = {"kernel": "Linux", "machine": "x86_64", "glibc": "glibc 2.34"}


def probes(**answers: str) -> str:
    return "".join(f"probe_{name}() {{ printf '%s\\n' '{answer}'; }}\n" for name, answer in answers.items())


@pytest.mark.parametrize("glibc", ["glibc 2.34", "glibc 2.36", "glibc 2.100", "glibc 3.0"])
def test_good_machine_passes(glibc: str) -> None:
    result = bash(probes(**GOOD | {"glibc": glibc}) + "check_platform")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "Darwin", "machine": "arm64"}, "this is Darwin on arm64"),
        ({"machine": "aarch64"}, "this is Linux on aarch64"),
        ({"glibc": "glibc 2.31"}, "glibc here is 2.31, and the wheels need >= 2.34"),
        ({"glibc": "glibc 2.4"}, "glibc here is 2.4, and the wheels need >= 2.34"),
        ({"glibc": ""}, "no glibc found (musl?)"),
    ],
)
def test_a_refusal_names_the_problem_and_alternatives(changes: dict[str, str], message: str) -> None:
    result = bash(probes(**GOOD | changes) + "check_platform")
    assert result.returncode == 1
    assert message in result.stderr
    assert "WSL2" in result.stderr and "docker/README.md" in result.stderr


def test_a_full_disk_is_refused_for_a_missing_folder() -> None:
    result = bash(probes(free_gb="3") + "check_disk /tmp/none/such 8")
    assert result.returncode == 1
    assert "3 GB free on the disk of /tmp/none/such, set-up needs about 8 GB" in result.stderr
    assert bash(probes(free_gb="8") + "check_disk /tmp/none/such 8").returncode == 0
    assert bash("check_disk /tmp/none/such 0").returncode == 0  # the real df


@pytest.mark.parametrize(
    ("variable", "driver", "device"),
    [("", "true", "gpu"), ("", "false", "cpu"), ("cpu", "true", "cpu"), ("gpu", "false", "gpu")],
)
def test_device(variable: str, driver: str, device: str) -> None:
    result = bash(f"probe_gpu() {{ {driver}; }}\nchoose_device", {"SLIME_LIKE_DEVICE": variable})
    assert (result.returncode, result.stdout) == (0, f"{device}\n")


def test_unknown_device_is_refused() -> None:
    result = bash("choose_device", {"SLIME_LIKE_DEVICE": "tpu"})
    assert result.returncode == 1
    assert "SLIME_LIKE_DEVICE=tpu: give cpu or gpu" in result.stderr


def test_a_cpu_environment_sees_no_gpu() -> None:
    show = "echo ${CUDA_VISIBLE_DEVICES-unset}"
    assert bash(show, {"SLIME_LIKE_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0"}).stdout == "\n"
    assert bash(show, {"CUDA_VISIBLE_DEVICES": "0"}).stdout == "0\n"
