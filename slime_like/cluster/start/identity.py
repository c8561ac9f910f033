"""Settings and inputs of a run as recorded in its checkpoints, and their changes on resume."""

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
# Files that determine token ids, chat template and end of responses.
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
# Keys of config.json that do not describe the model.
VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


def run_record(cfg: TrainConfig) -> dict[str, Any]:
    """Return settings, config.json, and the SHA-256 of tokenizer and training data files, as a JSON object.

    ``data.train`` is omitted if the run replays dumped rollouts or there is no such file.
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


def changed_inputs(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a description of each changed input.

    Tokenizer files are described by key and name, the file of ``data.train`` by its key, and fields of config.json by name and
    both values. The fields ``VOLATILE`` of config.json are not compared, nor is the file of ``data.train`` if one of the runs
    replays dumped rollouts.
    """
    old, new = recorded["inputs"], current["inputs"]
    ignored = {DATA} if any(_replays(run) for run in (recorded, current)) else set[str]()
    files = [name for name in sorted({*old, *new} - ignored) if old.get(name) != new.get(name)]
    old_model, new_model = _model(recorded["model"]), _model(current["model"])
    fields = [key for key in sorted(old_model | new_model) if old_model.get(key) != new_model.get(key)]
    return [
        *files,
        *(f"{MODEL}/config.json ({key} {old_model.get(key)!r} -> {new_model.get(key)!r})" for key in fields),
    ]


def _replays(run: Mapping[str, Any]) -> bool:
    """Return whether the run of a ``run_record`` replays dumped rollouts."""
    return run["config"]["run"].get("replay_from") is not None


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flatten(dict(values)).items() if key.split(".")[-1] not in VOLATILE}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys. Example: ``{"a": {"b": 1}}`` gives ``{"a.b": 1}``."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        settings |= (
            flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        )
    return settings
