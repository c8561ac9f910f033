"""Secrets in logs of every library, and output that cannot be written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging
from slime_like.printable import hide_in_logs
hide_in_logs("s3cret")
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
logging.info("args=" + str({"api_key": "s3cret"}))
logging.warning("%s and %d", "the s3cret", 7)
logging.getLogger("uvicorn").error({"kept": 1})
"""


def test_a_secret_is_hidden_in_messages_and_arguments() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines() == ["args={'api_key': '***'}", "the *** and 7", "{'kept': 1}"]


@pytest.mark.parametrize(("redirect", "code"), [(">/dev/full", 1), ("| true; exit ${PIPESTATUS[0]}", 0)])
def test_commands_of_train_py_end_without_a_traceback_if_nobody_reads(redirect: str, code: int) -> None:
    train = Path(__file__).parents[2] / "train.py"
    command = f"{shlex.join([sys.executable, str(train), '--help'])} {redirect}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    expected = "standard output cannot be written: No space left on device\n" if code else ""
    assert (process.returncode, process.stderr) == (code, expected)
