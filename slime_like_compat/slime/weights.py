"""Verdicts on the flags of slime's ``train.py`` that name a checkpoint of the policy, its reference or its teacher."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from slime_like.config.schema.family_entry import REFUSED_FAMILIES
from slime_like.errors import ConfigError
from slime_like.planner.models import refused_type
from slime_like.util.reading import InputFile
from slime_like_compat.slime.occurrences import FlagOccurrence, Flags

QUANTISED = re.compile(r"(?<![a-z0-9])(fp8|fp4|nvfp4|mxfp4|int4|int8|awq|gptq|w\da\d+)(?![a-z0-9])", re.IGNORECASE)


def ref_load(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    """Return the verdict on --ref-load, from which slime's policy starts if --load has no checkpoint.

    The verdict is ``mapped`` if the flag names another model than --hf-checkpoint, and else ``dropped`` if the job has no
    reference model. Return None, no special verdict, for a reference of the same model and for an unknown value.
    """
    if item.problem:
        return None
    is_same_model = _model_name(item.text) == _model_name(flags.text("--hf-checkpoint"))
    if not is_same_model and "--hf-checkpoint" in flags:
        reference = ", and is the reference" if flags.has_kl and not flags.is_supervised else ""
        return "mapped", f"a model of another name than --hf-checkpoint: the policy starts from it{reference}"
    if flags.is_supervised or not flags.has_kl:
        return (
            "dropped",
            "the job has no KL to a reference; the policy starts from --hf-checkpoint, whose model has the same name",
        )
    return None


def load(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    """Return the verdict ``dropped`` and its note if --load equals --ref-load but not --save, so that a new run starts.

    Return None for any other --load, and for an unknown one: they have no special verdict.
    """
    if item.problem:
        return None
    if item.text.rstrip("/") == flags.text("--ref-load").rstrip("/") != flags.text("--save").rstrip("/"):
        return "dropped", "the weights of --ref-load, from which a new run starts"
    return None


def start_checkpoint(flags: Flags) -> str | None:
    """Return the value of --ref-load if the recipe's policy starts from that checkpoint, else None.

    The policy starts from it if the verdict of ``ref_load`` is ``mapped``.
    """
    item = flags.by_name.get("--ref-load")
    verdict_note = ref_load(item, flags) if item is not None else None
    return item.text if item is not None and verdict_note is not None and verdict_note[0] == "mapped" else None


def _model_name(path: str) -> str:
    """Return the last part of a checkpoint's path in lower case, without a converter's suffix such as ``_torch_dist``."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[-_](torch_dist|torch-dist|mcore|megatron|dist)$", "", name)


def hf_checkpoint(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    """Return ``refused`` and a note if --hf-checkpoint is known to be quantised or of an unsupported type, else None."""
    del flags
    if model_type := refused_type(item.text):
        return "refused", f"model_type {model_type} is not supported: {REFUSED_FAMILIES[model_type]}"
    config = Path(os.path.expanduser(item.text)) / "config.json"
    try:
        fields = InputFile(config, ConfigError).json_object() if config.is_file() else None
    except (OSError, ConfigError):
        return None  # load_config refuses the file and names the place
    quantised = (
        "quantization_config" in fields if fields is not None else bool(QUANTISED.search(_model_name(item.text)))
    )
    if not quantised or item.problem:
        return None
    return (
        "refused",
        "quantised weights: engines have the trainer's 16-bit weights; name the model's 16-bit checkpoint in a copy of the script",
    )


def teacher(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    """Return ``refused`` and a note if --opd-teacher-load ends in ``_torch_dist``, as Megatron checkpoints do; else None."""
    del flags
    if item.problem or not re.search(r"[-_]torch[-_]dist/?$", item.text):
        return None
    return (
        "refused",
        "a teacher is read from an HF folder: name the HF folder of this checkpoint in a copy of the script",
    )
