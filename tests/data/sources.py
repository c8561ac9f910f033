"""Test datasets on disk and the sources that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from slime_like.config.schema.rollout import DataConfig, RewardConfig
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.reward.check import label_rule
from slime_like.types import Prompt
from tests.data.character_tokenizer import TEMPLATE, characters

TEN = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(10)]


@cache
def plain_tokenizer() -> Any:
    """Return the character tokenizer, created at the first call, because importing transformers takes seconds."""
    return characters()


@cache
def chat_tokenizer() -> Any:
    """Return the character tokenizer with a chat template."""
    return characters(template=TEMPLATE)


def write(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    """Write a jsonl file; strings are written as raw lines."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def context(path: Path | str, **changes: Any) -> SourceContext:
    base = SourceContext(str(path), plain_tokenizer(), max_context_len=64, needs_label=label_rule(RewardConfig()))
    return replace(base, **changes)


def source(path: Path | str, config: DataConfig | None = None, **changes: Any) -> FileSource:
    return FileSource(config or data(), context(path, **changes))


def data(**changes: Any) -> DataConfig:
    return DataConfig(train="unused", **changes)


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [p.text for p in prompts]
