"""Checks of the safetensors headers in a Hugging Face folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.rules.hf import HfConfig, downloaded_file
from slime_like.config.rules.quantised import SCALE, check_scales, check_tensors, read_scales
from slime_like.errors import CheckpointError
from slime_like.util.reading import Count, InputFile, abbreviate, parse_json, typed

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_TOWERS = re.compile(r"(?:^|\.)(?:mtp|visual|vision_tower|vision_model)\.")  # towers with separate layers
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
METADATA = "__metadata__"  # entry of a header that describes no tensor
LONGEST_NAME = 255  # maximum bytes of a file name on Linux
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits per element of each safetensors dtype."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Tensor entry of a safetensors header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def check_weights(key: str, folder: str) -> int:
    """Return the number of parameters in the safetensors files of ``folder``, after checking that each is complete.

    Scales of float8 weights do not count. A file is complete if the tensors in its header fill it. Raises
    ``CheckpointError`` naming ``key`` if a file is missing, damaged or incomplete, lacks a tensor that the index places
    in it, or has a quantised format that is not supported.
    """
    return sum(map(_parameters, _headers(key, folder).values()))


def check_shapes(key: str, model: HfConfig) -> None:
    """Raise ``CheckpointError`` naming ``key`` unless the weights have the vocabulary, width and layers of config.json.

    Every quantised weight must have the scales that config.json declares. The errors of ``check_weights`` are raised too.
    """
    stored_tensors = {
        name: tensor for header in _headers(key, model.folder).values() for name, tensor in header.items()
    }
    check_scales(read_scales(key, Path(model.folder), model.float8, stored_tensors), stored_tensors)
    tensors = {name: tensor for name, tensor in stored_tensors.items() if not _OTHER_TOWERS.search(name)}
    for name, tensor in tensors.items():
        expected = (model.vocab_size, model.hidden_size)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and tensor.shape != expected:
            raise CheckpointError(
                f"{key}={model.folder!r}: {name} is {list(tensor.shape)}, but config.json has vocab_size {expected[0]} and "
                f"hidden_size {expected[1]}: are config.json and the weights from the same model?"
            )
    layers = {int(match[1]) for name in tensors if (match := _LAYER.search(name))}
    if layers and (missing := set(range(model.num_layers)) - layers):
        raise CheckpointError(
            f"{key}={model.folder!r}: config.json has num_hidden_layers {model.num_layers}, but the weights have no layer "
            f"{min(missing)}: are config.json and the weights from the same model?"
        )
    if layers and max(layers) >= model.num_layers + model.mtp_layers:
        raise CheckpointError(
            f"{key}={model.folder!r}: the weights have a layer {max(layers)}, but config.json has num_hidden_layers "
            f"{model.num_layers}, so it would be ignored: are config.json and the weights from the same model?"
        )


def _headers(key: str, folder: str) -> dict[str, dict[str, TensorEntry]]:
    """Return the headers of the safetensors files of ``folder``: a dict from file names to tensors by name.

    Raises ``CheckpointError`` if a file is missing or damaged, lacks a tensor that the index places in it, or has a quantised
    format that is not supported.
    """
    root = Path(folder)
    index = root / INDEX
    if not index.exists():
        single = root / SINGLE
        if not single.exists():
            raise CheckpointError(
                f"{key}={folder!r} has neither {SINGLE} nor {INDEX}: download the model in safetensors format"
            )
        return {SINGLE: read_header(key, single)}
    file_of_tensor = read_index(key, index)
    headers = {name: read_header(key, root / name) for name in sorted(set(file_of_tensor.values()))}
    if misplaced_names := sorted(name for name, file in file_of_tensor.items() if name not in headers[file]):
        raise CheckpointError(
            f"{key}: {index} places {abbreviate(misplaced_names[0])} in {file_of_tensor[misplaced_names[0]]}, which does not contain it "
            f"({len(misplaced_names)} such tensors); download the model again"
        )
    return headers


def read_index(key: str, path: Path) -> dict[str, str]:
    """Return a dict from tensor names to file names, read from the index ``path``.

    Raises ``CheckpointError`` naming ``key`` and the index if it is missing or damaged, or names a file in another folder.
    """
    file = downloaded_file(key, path)
    file_of_tensor = file.json_object().get("weight_map")
    if not isinstance(file_of_tensor, dict) or not file_of_tensor:
        raise file.refused("has no weight_map")
    files = file.typed(file_of_tensor, dict[str, str])
    if invalid_name := next(
        (name for name in files.values() if Path(name).name != name or len(name) > LONGEST_NAME), None
    ):
        raise file.refused(f"names the file {abbreviate(invalid_name)}, which is not in the same folder")
    return files


def read_header(key: str, path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name.

    Raises ``CheckpointError`` naming ``key`` and the file if the file or its header cannot be read, if the header has a
    tensor name of an unsupported quantised format or an unknown dtype, if the size of a tensor does not fit its dtype and
    shape, or if the tensors do not fill the file.
    """
    file = downloaded_file(key, path)
    file.check_regular()
    tensors, start = _read_entries(file)
    check_tensors(key, path, {name: tensor.dtype for name, tensor in tensors.items()})
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, stop = tensor.data_offsets
        if tensor.dtype not in BITS:
            raise file.refused(
                f"has tensor {abbreviate(name)} of dtype {abbreviate(tensor.dtype)}, which is not a safetensors dtype"
            )
        num_bits = math.prod(tensor.shape) * BITS[tensor.dtype]
        if begin != end or (stop - begin) * 8 != num_bits:
            raise file.refused(
                f"has tensor {abbreviate(name)} at data_offsets {[begin, stop]} where {num_bits // 8} bytes of "
                f"{tensor.dtype}{list(tensor.shape)} should start at {end}"
            )
        end = stop
    if (size := path.stat().st_size) != start + end:
        raise file.refused(f"has {size} bytes, but its header describes {start + end}")
    return tensors


def _read_entries(file: InputFile) -> tuple[dict[str, TensorEntry], int]:
    """Return the header's entries and the offset at which tensor data begins.

    Raises ``CheckpointError`` if the file ends inside its header, or the header cannot be read.
    """
    size = file.path.stat().st_size
    try:
        with file.path.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if size < 8 or length > size - 8:
                raise file.refused(f"is truncated inside its header ({size} bytes)")
            values = parse_json(content.read(length))
        if isinstance(values, Mapping):
            _check_metadata(values.get(METADATA))
            values = {name: entry for name, entry in values.items() if name != METADATA}
        return typed(values, dict[str, TensorEntry]), 8 + length
    except (OSError, ValueError) as error:
        raise file.refused(f"has no readable safetensors header ({error})") from error


def _check_metadata(metadata: object) -> None:
    """Raise ``ValueError`` unless a header's metadata are absent or a map of strings."""
    if metadata is None:
        return
    try:
        typed(metadata, dict[str, str])
    except ValueError as error:
        raise ValueError(f"{METADATA} is {abbreviate(metadata)} instead of a map of strings") from error


def _parameters(tensors: Mapping[str, TensorEntry]) -> int:
    return sum(math.prod(tensor.shape) for name, tensor in tensors.items() if not name.endswith(SCALE))
