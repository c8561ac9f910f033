"""Reader of the config and the tensors of a folder in HF format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_like.config.rules.hf import downloaded_file, read_json, refuse_code
from slime_like.config.rules.quantised import Scales, read_float8, read_scales
from slime_like.config.rules.weight_files import INDEX, SINGLE, TensorEntry, read_header, read_index
from slime_like.config.schema.names import FAMILIES
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.float8 import dequantise
from slime_like.util.imports import first_import, without_model_classes
from slime_like.util.reading import reason


class HFFolder:
    """A local HF checkpoint. Float8 weights are multiplied by their scales, which are not in ``names()``.

    Raises ``CheckpointError`` if the folder or a file is missing, if a file is damaged or belongs to another model, if
    config.json requires Python code from the folder, or if the quantisation is not supported.
    """

    def __init__(self, path: str | Path, key: str = "model.hf_checkpoint") -> None:
        self.path = Path(path)
        self.key = key
        if not self.path.is_dir():
            raise CheckpointError(f"{key}={path}: no such folder; set {key} to a local folder in HF format")
        self.raw_config: dict[str, Any] = read_json(key, self.path / "config.json")
        self.float8 = read_float8(key, self.path, self.raw_config)
        refuse_code(key, self.path / "config.json", self.raw_config)
        self._files: dict[str, Any] = {}
        self._entries: dict[str, TensorEntry] = {}  # entries of the files that have been opened
        self._scales: Scales | None = None
        self._file_of: dict[str, str] | None = None  # tensor name -> file name

    def config(self) -> Any:
        """Return the transformers config object. Raises ``CheckpointError`` if transformers cannot read config.json."""
        with first_import("transformers"):
            from transformers import AutoConfig

        family = FAMILIES.get(str(self.raw_config.get("model_type")))
        try:
            with without_model_classes():
                if family is not None and family.config_class:
                    config = AutoConfig.for_model(**{**self.raw_config, "model_type": family.config_class})
                    config.model_type = self.raw_config["model_type"]  # names the family, in errors and checkpoints too
                    return config
                return AutoConfig.from_pretrained(str(self.path), local_files_only=True, trust_remote_code=False)
            # Fault boundary: transformers' config classes raise errors of many types.
        except Exception as error:
            file = downloaded_file(self.key, self.path / "config.json")
            raise file.refused(f"cannot be used: transformers cannot read it ({reason(error)})") from error

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return tensor ``name`` on the CPU; ``shape`` is the one that config.json implies.

        Raises ``CheckpointError`` if the tensor is missing or has another shape, or as ``apply_scales`` does.
        """
        locations = self._locations()
        if name not in locations:
            raise CheckpointError(
                f"{self.key}={str(self.path)!r} has no tensor {name!r}: its config.json describes another model, or the checkpoint "
                "is incomplete; download it again"
            )
        self._check_shape(name, shape)
        return self.apply_scales(name, self._open(locations[name]).get_tensor(name))

    def names(self) -> list[str]:
        """Return the names of all tensors for which ``is_scale`` is false, sorted."""
        return sorted(name for name in self._locations() if not self.is_scale(name))

    def read_as_stored(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return tensor ``name`` in its stored shape and dtype; multiply a float8 weight by its scales and cast it to ``dtype``.

        ``name`` is one of ``names()``. Raises ``CheckpointError`` as ``apply_scales`` does.
        """
        tensor: Tensor = self._open(self._locations()[name]).get_tensor(name)
        scaled = self.apply_scales(name, tensor)
        return scaled if scaled is tensor else scaled.to(dtype)

    def has(self, name: str) -> bool:
        """Return whether the folder contains tensor ``name``."""
        return name in self._locations()

    def part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        """Return ``tensor(name, shape)[index]``, reading only that part. The folder must contain the tensor (``has``).

        Raises ``CheckpointError`` if the shape differs, or as ``apply_scales`` does.
        """
        self._check_shape(name, shape)
        return self.apply_scales(name, self._open(self._locations()[name]).get_slice(name)[index], index)

    def is_scale(self, name: str) -> bool:
        """Return whether tensor ``name`` holds scales of another tensor in the folder, such as a float8 weight."""
        return name in self._all_scales().names

    def apply_scales(self, name: str, tensor: Tensor, index: int | None = None) -> Tensor:
        """Return ``tensor``, which is stored as ``name``, multiplied by its scales if it has scales.

        With ``index``, ``tensor`` is only the entry ``index`` of the stored tensor. Raises ``CheckpointError`` if the stored
        dtype is not that of a weight, or if the scales are missing or cannot be applied.
        """
        entry = self._entry(name)
        scale = self._all_scales().name_of(name, entry.dtype)
        if scale is None:
            return tensor
        assert self.float8 is not None
        self._all_scales().check(name, entry.shape, self._entry(scale))
        file = self._open(self._locations()[scale])
        scales: Tensor = file.get_tensor(scale) if index is None else file.get_slice(scale)[index]
        return dequantise(tensor, scales, self.float8.block)

    def _all_scales(self) -> Scales:
        if self._scales is None:
            self._scales = read_scales(self.key, self.path, self.float8, self._locations())
        return self._scales

    def _entry(self, name: str) -> TensorEntry:
        self._open(self._locations()[name])
        return self._entries[name]

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if (stored_shape := self._entry(name).shape) != tuple(shape):
            raise CheckpointError(
                f"{self.key}: {self.path / self._locations()[name]}: {name} has shape {stored_shape} but config.json implies "
                f"{tuple(shape)}; use the config.json that belongs to these weights"
            )

    def _locations(self) -> dict[str, str]:
        """Return the file name of each tensor.

        Raises ``CheckpointError`` if the folder has neither an index nor model.safetensors, as ``read_index`` or
        ``read_header`` does, or if safetensors cannot open the file.
        """
        if self._file_of is None:
            if (self.path / INDEX).is_file():
                self._file_of = read_index(self.key, self.path / INDEX)
            elif (self.path / SINGLE).is_file():
                self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
            else:
                raise CheckpointError(
                    f"{self.key}={str(self.path)!r} has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported: convert the model"
                )
        return self._file_of

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            entries = read_header(self.key, path)
            files_of_tensors = (self._file_of or {}).items()
            if missing := next(
                (name for name, tensor_file in files_of_tensors if tensor_file == file and name not in entries), None
            ):
                raise CheckpointError(
                    f"{self.key}: {self.path / INDEX} places {missing!r} in {file}, which does not contain it; download {file} again"
                )
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                message = f"{self.key}: {path}: truncated or corrupt ({reason(error)}); download or export it again"
                raise CheckpointError(message) from error
            self._entries |= entries
        return self._files[file]
