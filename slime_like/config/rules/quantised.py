"""Quantised Hugging Face checkpoints. Only float8 weights with a scale per block or matrix are supported.

Weights that are cast without their scales are garbage. A weight is therefore rejected if its dtype is unknown or if the
checkpoint has scales for it that no code applies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from slime_like.errors import CheckpointError

CONFIG_KEY = "quantization_config"
CONFIG_KEYS = (CONFIG_KEY, "compression_config")
OTHER_CONFIG = "hf_quant_config.json"  # config of NVIDIA's ModelOpt
# Suffix of a tensor's name -> format that writes it; the first match counts.
NAMES = {
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "float8 or int8 with scales",
    ".weight_scale_2": "ModelOpt",
    ".input_scale": "float8 or int8 with scales",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
    ".weight.absmax": "bitsandbytes",
    ".weight.SCB": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
WEIGHTS = ("F64", "F32", "F16", "BF16")  # safetensors dtypes of weights without scales
FLOAT8 = "F8_E4M3"
SCALE = "_scale_inv"  # suffix of the name of a float8 weight's scales
SCALES = ("F32", "F16", "BF16", "F8_E8M0")
IGNORED = ".activation_scale"  # suffix of static activation scales, which 16-bit and 32-bit models do not use
# Suffixes of the names of tensors that are neither float nor weights.
BUFFERS = (".position_ids", ".num_batches_tracked", ".attn.bias", ".masked_bias")
FIX = (
    "give the model's bfloat16, float16 or float32 checkpoint, one with float8 weights and a scale per block "
    "(quant_method 'fp8', weight_block_size), or a dequantised copy of this one"
)
_SCALE_WORD = re.compile(r"(?:^|_)(?:scales?|zero_points?|zeros|absmax)(?:_\w+)?$")


class StoredTensor(Protocol):
    """Entry of a safetensors header."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Float8:
    """Format of float8 weights: one scale per block of ``block`` rows and columns, or per matrix if it is None."""

    block: tuple[int, int] | None

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of ``shape``. Blocks at the edge may be incomplete."""
        rows, columns = self.block or shape[-2:]
        return (*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns))


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of the weights of a checkpoint. ``folder`` is the checkpoint's folder, the value of the config key ``key``."""

    key: str
    folder: Path
    float8: Float8 | None  # None: config.json declares no float8 weights
    of_weight: Mapping[str, tuple[str, ...]]  # name of a weight -> names of its scales
    names: frozenset[str]  # names of all scales

    def name_of(self, weight: str, dtype: str) -> str | None:
        """Return the name of the scales by which ``weight`` must be multiplied; None if it is not quantised.

        A weight is not quantised if ``dtype`` is one of ``WEIGHTS`` and it has no scales. For any other weight, raises
        ``CheckpointError`` if its dtype is not ``FLOAT8``, if config.json declares no float8 weights, or if the weight lacks
        its scales or has additional ones. Static activation scales are ignored.
        """
        names = [name for name in self.of_weight.get(weight, ()) if not name.endswith(IGNORED)]
        if dtype in WEIGHTS and not names:
            return None
        if dtype != FLOAT8:
            self.refuse(f"{weight!r} is in {dtype}" + (f" with scales in {names[0]!r}" if names else ""))
        if self.float8 is None:
            self.refuse(f"{weight!r} is in {dtype}, but config.json has no {CONFIG_KEY} with quant_method='fp8'")
        if weight + SCALE not in names:
            self.refuse(f"{weight!r} is in {dtype}, but {weight + SCALE!r} is missing")
        if unused_names := [name for name in names if name != weight + SCALE]:
            self.refuse(f"{weight!r} is in {dtype} with scales in {unused_names[0]!r}")
        return weight + SCALE

    def check(self, weight: str, shape: tuple[int, ...], scales: StoredTensor) -> None:
        """Raise ``CheckpointError`` unless ``scales`` fits the float8 weight ``weight`` of ``shape``.

        The weight must have at least two dimensions. The dtype of the scales must be one of ``SCALES``, and their shape the
        one that config.json implies. If a matrix has one scale for all its elements, any shape with one element is accepted
        for that scale. ``scales`` must be the tensor that ``name_of`` names.
        """
        assert self.float8 is not None, "name_of refuses float8 weights without it"
        name = weight + SCALE
        if scales.dtype not in SCALES:
            self.refuse(f"{name!r} is in {scales.dtype}")
        if len(shape) < 2:
            self.refuse(f"{weight!r} of shape {list(shape)} is in {FLOAT8}")
        expected = self.float8.scale_shape(shape)
        is_scalar = self.float8.block is None and len(shape) == 2 and math.prod(scales.shape) == 1
        if scales.shape != expected and not is_scalar:
            self.refuse(
                f"{name!r} has shape {list(scales.shape)}, but {list(expected)} would be one scale per block of "
                f"{list(self.float8.block or shape[-2:])} of {weight!r} {list(shape)}"
            )

    def refuse(self, evidence: str) -> NoReturn:
        """Raise ``CheckpointError`` on a format that cannot be read. Its message contains ``evidence``."""
        raise _refusal(self.key, self.folder, evidence)


def read_scales(key: str, folder: Path, float8: Float8 | None, names: Iterable[str]) -> Scales:
    """Return the scales among the tensors ``names`` of a checkpoint, each assigned to its weight.

    Scales whose weight is missing are left out. ``folder`` is the checkpoint's folder, the value of the config key ``key``.
    """
    tensors, scales = frozenset(names), set[str]()
    of_weight: dict[str, tuple[str, ...]] = {}
    for name in sorted(tensors):
        module, _, last = name.rpartition(".")
        if (match := _SCALE_WORD.search(last)) is None:
            continue
        candidates = (f"{module}.{last[: match.start()]}", f"{module}.weight")
        if weight := next((candidate for candidate in candidates if candidate in tensors and candidate != name), None):
            of_weight[weight] = (*of_weight.get(weight, ()), name)
            scales.add(name)
    return Scales(key, folder, float8, of_weight, frozenset(scales))


def check_scales(scales: Scales, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ``CheckpointError`` if a tensor has an unknown dtype, or if its scales are missing, wrong or unused.

    A name that ends in ``SCALE`` without its weight is an error too. Buffers (``BUFFERS``) may have any dtype except
    ``FLOAT8``.
    """
    for name, tensor in tensors.items():
        if name in scales.names or (tensor.dtype not in (*WEIGHTS, FLOAT8) and name.endswith(BUFFERS)):
            continue
        if name.endswith(SCALE):
            scales.refuse(f"{name!r} are the scales of a weight that is missing")
        if scale := scales.name_of(name, tensor.dtype):
            scales.check(name, tensor.shape, tensors[scale])


def read_float8(key: str, folder: Path, values: Mapping[str, Any]) -> Float8 | None:
    """Return the format of float8 weights that the config.json of ``folder`` declares; None if it declares none.

    ``values`` is the content of config.json. Raises ``CheckpointError`` naming ``key``, which sets ``folder``, if
    config.json declares another quantisation, a quantisation in its ``text_config`` or invalid blocks, or if the folder
    contains ModelOpt's config file (``OTHER_CONFIG``).
    """
    float8: Float8 | None = None
    for part, prefix in ((values, ""), (values.get("text_config"), "text_config.")):
        if not isinstance(part, Mapping):
            continue
        fields = cast("Mapping[str, Any]", part)
        for name in CONFIG_KEYS:
            if (quantisation := fields.get(name)) is None:
                continue
            evidence = f"config.json has {prefix}{name}{_method(quantisation)}"
            if prefix + name != CONFIG_KEY or not isinstance(quantisation, Mapping):
                raise _refusal(key, folder, evidence)
            float8 = _float8(key, folder, cast("Mapping[str, Any]", quantisation), evidence)
    if (folder / OTHER_CONFIG).exists():
        raise _refusal(key, folder, f"it contains {OTHER_CONFIG}")
    return float8


def _float8(key: str, folder: Path, quantisation: Mapping[str, Any], evidence: str) -> Float8:
    if quantisation.get("quant_method") != "fp8":
        raise _refusal(key, folder, evidence)
    if quantisation.get("fmt") not in (None, "e4m3"):
        raise _refusal(key, folder, f"{evidence} and fmt={str(quantisation['fmt'])[:40]!r}")
    block: object = quantisation.get("weight_block_size")
    if block is None:
        return Float8(None)
    sizes = cast("list[object]", block) if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise _refusal(key, folder, f"{evidence} and weight_block_size={str(block)[:40]}, not two positive integers")
    rows, columns = cast("list[int]", sizes)
    return Float8((rows, columns))


def check_tensors(key: str, path: Path, dtypes: Mapping[str, str]) -> None:
    """Raise ``CheckpointError`` if a tensor name in the safetensors file ``path`` shows that its format is unsupported.

    ``NAMES`` has the endings of such names. ``dtypes`` maps the names of the file's tensors to their dtypes.
    """
    for name, dtype in dtypes.items():
        if format_name := next((kind for end, kind in NAMES.items() if name.endswith(end)), ""):
            raise _refusal(key, path.parent, f"{path.name} contains {name!r} in {dtype}, the format of {format_name}")


def _method(value: object) -> str:
    if not isinstance(value, Mapping):
        return ""
    fields = cast("Mapping[str, Any]", value)
    name = next((field for field in ("quant_method", "quant_algo", "format") if fields.get(field)), None)
    return f".{name}={str(fields[name])[:40]!r}" if name else ""


def _refusal(key: str, folder: Path, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"{key}={str(folder)!r} is a quantised checkpoint ({evidence}), which cannot be loaded: {FIX}"
    )
