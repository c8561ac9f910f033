"""Model modules that an engine need not import to serve one model."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path


def other_models(model_path: str) -> list[str]:
    """Return SGLang's model files that do not define the architecture of ``model_path``; empty if that is unknown.

    SGLang imports all 250 files to find one class; it skips those named by ``SGLANG_DISABLED_MODEL_ARCHS``.
    """
    spec = find_spec("sglang")
    config = Path(model_path) / "config.json"
    if spec is None or not spec.submodule_search_locations or not config.is_file():
        return []
    try:
        architectures: list[str] = json.loads(config.read_text())["architectures"]
    except (ValueError, KeyError, TypeError):
        return []  # SGLang reports the problem when it reads the file
    definition = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    files = sorted((Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py"))
    defining = {file for file in files if definition.search(file.read_text())}
    return [file.stem for file in files if file not in defining] if defining else []
