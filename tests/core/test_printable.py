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
logging.warning("%(key)s of %(rank)d", {"key": "the s3cret", "rank": 7})
logging.warning("%s %s %s", {"key": "s3cret"}, ["s3cret"], ("kept", 1))
logging.error(KeyError("s3cret"))
try:
    raise ValueError("for s3cret")
except ValueError:
    logging.exception("failed")
"""


def test_a_secret_is_hidden_in_messages_arguments_and_tracebacks() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = result.stderr.splitlines()
    assert lines[:6] == [
        "args={'api_key': '***'}",
        "the *** and 7",
        "{'kept': 1}",
        "the *** of 7",
        "{'key': '***'} ['***'] ('kept', 1)",
        "'***'",
    ]
    assert (lines[6], lines[-1]) == ("failed", "ValueError: for ***")


@pytest.mark.parametrize(("redirect", "code"), [(">/dev/full", 1), ("| true; exit ${PIPESTATUS[0]}", 0)])
def test_commands_of_train_py_end_without_a_traceback_if_nobody_reads(redirect: str, code: int) -> None:
    train = Path(__file__).parents[2] / "train.py"
    command = f"{shlex.join([sys.executable, str(train), '--help'])} {redirect}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    expected = "standard output cannot be written: No space left on device\n" if code else ""
    assert (process.returncode, process.stderr) == (code, expected)
