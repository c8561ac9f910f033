"""An older Python is refused in one message by every entry point of the package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("file", "error"), [("train.py", SystemExit), ("slime_like/__init__.py", ImportError)])
def test_an_older_python_is_refused(file: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(error, match=r"needs Python 3\.12, this is .*: run `bash scripts/setup\.sh`"):
        runpy.run_path(str(REPOSITORY / file))
