"""Secrets are hidden in logs of every library."""

from __future__ import annotations

import subprocess
import sys

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
