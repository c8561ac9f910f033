"""Comparison of a trainer checkpoint with the run's model, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.checkpoint.record import Manifest
from slime_like.config.rules.hf import read_json
from slime_like.errors import CheckpointError
from slime_like.util.vocabulary import padded_vocabulary


def check_saved_model(manifest: Manifest, source: Path, key: str, folder: str, tp: int) -> None:
    """Raise ``CheckpointError`` if the ``manifest`` of the checkpoint ``source`` does not describe the model in ``folder``.

    A padded vocabulary in the manifest must be the one that the tensor parallel size ``tp`` gives. ``key`` is the config key
    that sets ``folder``. Values that config.json leaves to the model class are not compared here but by the ranks.
    """
    top = read_json(key, Path(folder) / "config.json")
    text = top.get("text_config")  # text part of a multimodal model; its model_type differs from the model's
    config: dict[str, Any] = {**text, "model_type": None} if isinstance(text, dict) else top
    for name, saved_value in manifest.model.items():
        if name == "tie_word_embeddings" and manifest.model.get("head") == "value":
            continue  # a critic has no output layer to tie
        if config.get(name) is not None and config[name] != saved_value:
            raise CheckpointError(
                f"{source} was saved from another model: its {name} is {saved_value}, but {config[name]} in "
                f"{key}={folder!r}; use the model that the checkpoint was trained from"
            )
    check_padding(manifest, source, padded_vocabulary(int(config["vocab_size"]), tp), tp)


def check_padding(manifest: Manifest, source: Path, rows: int, tp: int) -> None:
    """Raise ``CheckpointError`` if ``manifest`` has a padded vocabulary, but not of ``rows`` rows, as ``tp`` requires."""
    saved_rows = manifest.model.get("padded_vocabulary", rows)
    if saved_rows != rows:
        raise CheckpointError(
            f"{source}: its vocabulary is padded to {saved_rows} rows, but tp={tp} pads it to {rows}: "
            "resume with the same tp (checkpoints are interchangeable between values of tp that divide 128)"
        )
