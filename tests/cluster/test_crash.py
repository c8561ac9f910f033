"""Crash bundles: free of terminal control sequences, with the logs of Ray's processes."""

from __future__ import annotations

from pathlib import Path

from slime_like.cluster.supervise.crash import write_bundle
from slime_like.errors import RewardError

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202etxt"


def raise_error(text: str) -> Exception:
    try:
        raise RewardError(text)
    except RewardError as error:
        return error


def test_bundle_files_have_no_terminal_control_sequences(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout_manager.log").write_bytes(f"a user printed {HOSTILE}\n".encode() + b"\xff\n")
    bundle = write_bundle(tmp_path, raise_error(f"a reward said {HOSTILE}"), [f"engine 0: {HOSTILE}"])
    texts = {path.name: path.read_text() for path in bundle.iterdir()}
    assert {"cause.txt", "traceback.txt", "rollout_manager.tail.txt"} <= texts.keys()
    for name, text in texts.items():
        assert not {char for char in text if not (char.isprintable() or char in "\n\t\ufffd")}, name
    for name in ("cause.txt", "traceback.txt", "rollout_manager.tail.txt"):
        assert r"\u001b]0;owned\u0007" in texts[name], name
    assert "in raise_error" in texts["traceback.txt"], "lines are kept"


def test_a_bundle_has_the_logs_of_rays_processes(tmp_path: Path) -> None:
    logs = tmp_path / "session"
    logs.mkdir()
    for name, text in {"raylet.out": "out of memory", "gcs_server.err": "", "monitor.log": "nothing"}.items():
        (logs / name).write_text(text)
    bundle = write_bundle(tmp_path, raise_error("a cause"), ray_logs=logs)
    assert [path.name for path in bundle.glob("ray_*")] == ["ray_raylet.out.tail.txt"]
    assert (bundle / "ray_raylet.out.tail.txt").read_text() == "out of memory\n"
