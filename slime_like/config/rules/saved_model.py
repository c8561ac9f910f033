"""Whether a checkpoint of this trainer is of the model that a run has for it: settled before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.checkpoint.record import Manifest
from slime_like.config.rules.hf import padded_vocabulary, read_json
from slime_like.errors import CheckpointError


def check_saved_model(manifest: Manifest, source: Path, key: str, folder: str, tp: int) -> None:
    """Raise ``CheckpointError`` where ``manifest``, of ``source``, is of another model than ``folder``, the value of ``key``.

    What config.json leaves to the model class is compared on the ranks.
    """
    whole = read_json(key, Path(folder) / "config.json")
    text = whole.get("text_config")  # beside a model of images, whose model_type is not the text's
    config: dict[str, Any] = {**text, "model_type": None} if isinstance(text, dict) else whole
    for name, found in manifest.model.items():
        if name == "tie_word_embeddings" and manifest.model.get("head") == "value":
            continue  # a critic has no output layer to tie
        if config.get(name) is not None and config[name] != found:
            raise CheckpointError(
                f"{source}: of another model: {name} is {found} there and {config[name]} in "
                f"{key}={folder!r}; give the checkpoint the model it was trained from"
            )
    check_padding(manifest, source, padded_vocabulary(int(config["vocab_size"]), tp), tp)


def check_padding(manifest: Manifest, source: Path, rows: int, tp: int) -> None:
    """Raise ``CheckpointError`` unless the vocabulary was padded to ``rows``, as it is at ``tp``."""
    found = manifest.model.get("padded_vocabulary", rows)
    if found != rows:
        raise CheckpointError(
            f"{source}: its vocabulary is padded to {found} rows, tp={tp} pads it to {rows}: "
            "resume with the tp it was saved with; those that divide 128 can take each other's checkpoints"
        )
