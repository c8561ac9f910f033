"""A run of train.py that a test gives up on: the error has the states and stacks of its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.errors import DeadlineExceeded
from tests.e2e import runs

SCRIPT = """
import sys
import time
from pathlib import Path
from slime_like.cluster.supervise.stacks import dump_stacks_on_signal

def never_returns():
    dump_stacks_on_signal(Path(sys.argv[1].partition("=")[2]) / "stacks", "driver")
    print("registered", flush=True)
    time.sleep(3600)

never_returns()
"""


def test_the_error_has_the_states_and_stacks_of_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    log = tmp_path / "log"
    training = runs.Training(f"run.dir={tmp_path}", log=log, script=str(script))
    training.wait_until(lambda: "registered" in log.read_text())
    monkeypatch.setattr(runs, "RUN_S", 0.1)
    with pytest.raises(
        DeadlineExceeded, match=r"(?s)process \d+: (sleeping|running): .*script\.py.*driver:\n.*in never_returns"
    ):
        training.wait()
    assert not training.running()
