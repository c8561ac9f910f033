"""Doctor: missing parts are problems, each with a fix."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slime_like.cluster.start import doctor, doctor_machine, doctor_software
from slime_like.cluster.start.doctor_finding import DoctorFinding, Level
from slime_like.errors import ConfigError
from slime_like.rollout.engine import plugins


def test_no_requirement_is_missing_on_this_machine() -> None:
    checks = (
        doctor_machine.check_system,
        doctor_machine.check_devices,
        doctor_machine.check_storage,
        doctor_machine.check_network,
    )
    findings = [finding for check in checks for finding in check()]
    assert [f for f in findings if f.level is Level.MISSING] == []
    assert {"python", "libc", "cpu", "memory", "gpu", "disk", "loopback"} <= {f.subject for f in findings}
    assert all(finding.fix for finding in findings if finding.level is not Level.OK)


def test_a_wrong_version_is_named_with_the_lock_it_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scripts" / "requirements"
    folder.mkdir(parents=True)
    (folder / "runtime.in").write_text("# comment\nhydra_core==1.0\nno-such-package\n")
    lock = "hydra-core==1.0.0 \\\n    --hash=sha256:0\nno-such-package==3.0\npytest==0.1\n    # via -r dev.in\n"
    for name in ("cpu.lock", "gpu.lock"):
        (folder / name).write_text(lock)
    monkeypatch.setattr(doctor_software, "REQUIREMENTS", folder)
    problems = {f.text.split()[0]: f for f in doctor_software.check_versions() if f.level is not Level.OK}
    assert problems["hydra-core"].level is Level.MISSING
    assert "the lock has 1.0.0" in problems["hydra-core"].text
    assert "scripts/requirements/" in problems["hydra-core"].fix
    assert "no-such-package is not installed, the lock has 3.0" in problems["no-such-package"].text
    assert problems["pytest"].level is Level.WARNING


def test_a_foreign_environment_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software, "_installed_version", lambda name: None)
    (finding,) = (f for f in doctor_software.check_versions() if f.level is not Level.OK)
    assert (finding.level, "not the project's environment" in finding.text) == (Level.MISSING, True)
    assert ".venv/bin/python" in finding.fix


def test_entry_points_that_are_not_registered_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"sglang.srt.plugins": ("no_such_plugin",)}
    monkeypatch.setattr(doctor_software, "ENTRY_POINTS", absent)
    monkeypatch.setattr(plugins, "ENTRY_POINTS", absent)
    (finding,) = doctor_software.check_plugins()
    assert (finding.level, "no_such_plugin" in finding.text) == (Level.MISSING, True)
    assert "pip install" in finding.fix
    with pytest.raises(ConfigError, match=r"sglang\.srt\.plugins: no_such_plugin.*run `bash scripts/setup\.sh`"):
        plugins.check_entry_points()


def test_without_a_c_compiler_torch_kernels_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = doctor_software.check_cpu_kernels()
    assert (finding.level, finding.subject) == (Level.WARNING, "cpu kernels")
    assert finding.text.startswith("torch: ")
    assert "no C compiler" in finding.text
    assert "apt-get install gcc" in finding.fix


def test_a_proxy_in_front_of_loopback_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    (proxy,) = (finding for finding in doctor_machine.check_network() if finding.subject == "proxy")
    assert "no_proxy=127.0.0.1" in proxy.fix
    for bypass in ("127.0.0.1", "example.org, 127.0.0.1", "*"):
        monkeypatch.setenv("no_proxy", bypass)
        assert [finding.subject for finding in doctor_machine.check_network()] == ["loopback"]


def test_the_exit_code_is_1_if_a_requirement_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, code in ((Level.OK, 0), (Level.WARNING, 0), (Level.MISSING, 1)):
        monkeypatch.setattr(
            doctor, "CHECKS", (lambda level=level: [DoctorFinding(level, "thing", "is so", "mend it")],)
        )
        out = io.StringIO()
        assert doctor.doctor(out) == code
        assert "thing" in out.getvalue()
        assert "fix: mend it" in out.getvalue()


def test_ranks_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software.sys, "executable", "/bin/false")
    (finding,) = doctor_software.check_collective()
    assert (finding.level, bool(finding.fix)) == (Level.MISSING, True)


@pytest.mark.ranks
def test_two_processes_all_reduce() -> None:
    (finding,) = doctor_software.check_collective()
    assert finding.level is Level.OK, finding.text
