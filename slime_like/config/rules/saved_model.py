"""Comparison of a trainer checkpoint with the run's model, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.checkpoint.record import Manifest
from slime_like.config.rules.hf import padded_vocabulary, read_json
from slime_like.errors import CheckpointError


def check_saved_model(manifest: Manifest, source: Path, key: str, folder: str, tp: int) -> None:
    """Raise ``CheckpointError`` if ``manifest``, of ``source``, describes another model than ``folder``, set by ``key``.

    Values that config.json leaves to the model class are compared on the ranks.
    """
    top = read_json(key, Path(folder) / "config.json")
    text = top.get("text_config")  # of a multimodal model, whose model_type is not the text's
    config: dict[str, Any] = {**text, "model_type": None} if isinstance(text, dict) else top
    for name, saved in manifest.model.items():
        if name == "tie_word_embeddings" and manifest.model.get("head") == "value":
            continue  # a critic has no output layer to tie
        if config.get(name) is not None and config[name] != saved:
            raise CheckpointError(
                f"{source}: of another model: {name} is {saved} there and {config[name]} in "
                f"{key}={folder!r}; give the checkpoint the model it was trained from"
            )
    check_padding(manifest, source, padded_vocabulary(int(config["vocab_size"]), tp), tp)


def check_padding(manifest: Manifest, source: Path, rows: int, tp: int) -> None:
    """Raise ``CheckpointError`` unless the vocabulary was padded to ``rows``, the padding at ``tp``."""
    saved_rows = manifest.model.get("padded_vocabulary", rows)
    if saved_rows != rows:
        raise CheckpointError(
            f"{source}: its vocabulary is padded to {saved_rows} rows, tp={tp} pads it to {rows}: "
            "resume with the tp it was saved with; those that divide 128 can take each other's checkpoints"
        )
