"""scripts/prepare_data.py: rows in the formats of public data sets become rows that the default source reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.rollout import DataConfig
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.util.deadline import scale
from tests.data.character_tokenizer import TEMPLATE, characters

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
CHAT = [{"role": "user", "content": "What is 2+2?"}]


def prepare(tmp_path: Path, name: str, **splits: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "source"
    source.mkdir()
    for split, rows in splits.items():
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SCRIPT), name, str(tmp_path / "out"), "--source", str(source)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120 * scale(), env=env)


def open_source(path: Path) -> FileSource:
    context = SourceContext(str(path), characters(template=TEMPLATE), 512, lambda rm_type: rm_type == "math")
    return FileSource(DataConfig(train=str(path), apply_chat_template=True), context)


@pytest.mark.slow
def test_gsm8k(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "9 * 200 = 1800\n#### 1,800"}
    result = prepare(tmp_path, "gsm8k", train=[row, row], test=[row])
    assert result.returncode == 0, result.stderr
    train, test = (open_source(tmp_path / "out" / "gsm8k" / f"{split}.jsonl") for split in ("train", "test"))
    assert (len(train), len(test)) == (2, 1)
    assert (test.prompts[0].label, test.prompts[0].rm_type) == ("1800", "math")
    assert test.prompts[0].text.startswith("<user>How many?\n")


@pytest.mark.slow
def test_rows_in_slimes_format_keep_their_messages(tmp_path: Path) -> None:
    result = prepare(tmp_path, "dapo-math-17k", train=[{"prompt": CHAT, "label": 4}])
    assert result.returncode == 0, result.stderr
    (prompt,) = open_source(tmp_path / "out" / "dapo-math-17k" / "train.jsonl").prompts
    assert (prompt.label, prompt.text) == ("4", "<user>What is 2+2?<assistant>")


def test_an_invalid_row_is_named(tmp_path: Path) -> None:
    good = {"question": "q", "answer": "#### 1"}
    result = prepare(tmp_path, "gsm8k", train=[good, {"question": "q", "answer": "no result"}], test=[good])
    assert result.returncode == 1
    assert (
        result.stderr.splitlines()[-1] == "gsm8k: gsm8k, split train, row 1 has no question, or no answer with '####'"
    )
    assert not (tmp_path / "out").exists()
