"""Settings and inputs of a run, as its checkpoints record them, and what of them has changed when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.checkpoint.hashes import hash_files
from slime_like.config.rules.hf import read_json
from slime_like.config.schema.root import TrainConfig
from slime_like.data.files import file_of

MODEL, DATA = "model.hf_checkpoint", "data.train"
# Everything that decides what a token id is, how messages become text, and where a response ends.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Keys of config.json that say nothing of the model.
VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


def run_record(cfg: TrainConfig) -> dict[str, Any]:
    """Return settings, config.json, and the SHA-256 of the tokenizer's and the training data's files, as JSON.

    The file of ``data.train`` is left out where a run does not read it.
    """
    files = dict(_files(cfg))
    hashes = hash_files(list(files.values()))
    return {
        "config": asdict(cfg),
        "model": read_json(MODEL, Path(cfg.model.hf_checkpoint) / "config.json"),
        "inputs": dict(zip(files, hashes, strict=True)),
    }


def _files(cfg: TrainConfig) -> Iterator[tuple[str, Path]]:
    folder = Path(cfg.model.hf_checkpoint)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            yield f"{MODEL}/{name}", folder / name
    if cfg.run.replay_from is None and (path := file_of(cfg.data.train)).is_file():
        yield DATA, path


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the inputs that are not what they were, files by key or name, fields of config.json with both values."""
    old, new = before["inputs"], now["inputs"]
    files = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    was, is_now = _model(before["model"]), _model(now["model"])
    fields = [key for key in sorted(was | is_now) if was.get(key) != is_now.get(key)]
    return [*files, *(f"{MODEL}/config.json ({key} {was.get(key)!r} -> {is_now.get(key)!r})" for key in fields)]


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flatten(dict(values)).items() if key.split(".")[-1] not in VOLATILE}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key. Example: ``{"a": {"b": 1}}`` gives ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found
