"""What an engine need not import to serve one model."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path


def other_models(model_path: str) -> list[str]:
    """SGLang's model files that do not define the architecture of ``model_path``; none when that cannot be told.

    SGLang imports all 250 of them to find one class; it skips those that ``SGLANG_DISABLED_MODEL_ARCHS`` names.
    """
    spec = find_spec("sglang")
    config = Path(model_path) / "config.json"
    if spec is None or not spec.submodule_search_locations or not config.is_file():
        return []
    try:
        architectures: list[str] = json.loads(config.read_text())["architectures"]
    except (ValueError, KeyError, TypeError):
        return []  # SGLang's own reading of the file says what is wrong with it
    wanted = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    files = sorted((Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py"))
    defining = {file for file in files if wanted.search(file.read_text())}
    return [file.stem for file in files if file not in defining] if defining else []
