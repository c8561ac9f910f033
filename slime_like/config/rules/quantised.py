"""Detection of quantised Hugging Face checkpoints, which are refused because casting without scales yields garbage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from slime_like.errors import CheckpointError

CONFIG_KEYS = ("quantization_config", "compression_config")
OTHER_CONFIG = "hf_quant_config.json"  # of NVIDIA's ModelOpt
# Suffix of a tensor's name -> format that writes it; the first match counts.
NAMES = {
    ".weight_scale_inv": "float8 with a scale per block",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "float8 or int8 with scales",
    ".weight_scale_2": "ModelOpt",
    ".input_scale": "float8 or int8 with scales",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    "_blocks": "MXFP4",
    ".weight.absmax": "bitsandbytes",
    ".weight.SCB": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
LOW_FLOATS = ("F8_", "F6_", "F4")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
FIX = "give the model's bfloat16, float16 or float32 checkpoint, or a dequantised copy of this one"


def check_config(key: str, folder: Path, values: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if config.json or ModelOpt's file marks ``folder``, set by ``key``, as quantised."""
    for part, prefix in ((values, ""), (values.get("text_config"), "text_config.")):
        if not isinstance(part, Mapping):
            continue
        fields = cast("Mapping[str, Any]", part)
        for name in CONFIG_KEYS:
            if (method := fields.get(name)) is not None:
                raise _refused(key, folder, f"config.json has {prefix}{name}{_method(method)}")
    if (folder / OTHER_CONFIG).exists():
        raise _refused(key, folder, f"it holds {OTHER_CONFIG}")


def check_tensors(key: str, path: Path, dtypes: Mapping[str, str]) -> None:
    """Raise ``CheckpointError`` if a tensor (name -> dtype) of the safetensors file ``path`` is quantised."""
    for name, dtype in dtypes.items():
        format_name = next((kind for end, kind in NAMES.items() if name.endswith(end)), "")
        is_integer = dtype in INTEGERS and name.endswith(".weight")
        if format_name or is_integer or dtype.startswith(LOW_FLOATS):
            by = f", as {format_name} has it" if format_name else ""
            raise _refused(key, path.parent, f"{path.name} holds {name!r} in {dtype}{by}")


def _method(value: object) -> str:
    if not isinstance(value, Mapping):
        return ""
    fields = cast("Mapping[str, Any]", value)
    name = next((field for field in ("quant_method", "quant_algo", "format") if fields.get(field)), None)
    return f".{name}={str(fields[name])[:40]!r}" if name else ""


def _refused(key: str, folder: Path, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"{key}={str(folder)!r} is a quantised checkpoint ({evidence}), which cannot be loaded: {FIX}"
    )
