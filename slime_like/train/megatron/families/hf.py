"""Reader of a folder in HF format: config, tokenizer files and safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_like.config.rules.hf import downloaded, read_json, refuse_code
from slime_like.config.rules.quantised import check_config
from slime_like.config.rules.weight_files import INDEX, SINGLE, read_header, read_index
from slime_like.errors import CheckpointError
from slime_like.util.imports import without_model_classes
from slime_like.util.reading import reason


class HFFolder:
    """A local HF checkpoint. Raises ``CheckpointError`` if a file is missing, truncated or of another model."""

    def __init__(self, path: str | Path, key: str = "model.hf_checkpoint") -> None:
        self.path = Path(path)
        self.key = key
        if not self.path.is_dir():
            raise CheckpointError(f"{key}={path}: no such folder; set {key} to a local folder in HF format")
        self.raw_config: dict[str, Any] = read_json(key, self.path / "config.json")
        check_config(key, self.path, self.raw_config)
        refuse_code(key, self.path / "config.json", self.raw_config)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] | None = None  # tensor name -> file name

    def config(self) -> Any:
        """Return the transformers config object."""
        from transformers import AutoConfig

        try:
            with without_model_classes():
                return AutoConfig.from_pretrained(str(self.path), local_files_only=True, trust_remote_code=False)
            # Fault boundary: transformers' config classes raise errors of many types.
        except Exception as error:
            file = downloaded(self.key, self.path / "config.json")
            raise file.refused(f"cannot be used: transformers cannot read it ({reason(error)})") from error

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return tensor ``name`` on the CPU; ``shape`` is the one that config.json implies."""
        locations = self._locations()
        if name not in locations:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is missing; config.json describes another model, or the checkpoint is incomplete"
            )
        tensor: Tensor = self._open(locations[name]).get_tensor(name)
        self._check_shape(name, tensor.shape, shape)
        return tensor

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._locations())

    def stored(self, name: str) -> Tensor:
        """Return tensor ``name`` of ``names()``, in its stored shape."""
        tensor: Tensor = self._open(self._locations()[name]).get_tensor(name)
        return tensor

    def has(self, name: str) -> bool:
        """Return whether the folder contains tensor ``name``."""
        return name in self._locations()

    def part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        """Return ``tensor(name, shape)[index]``, reading only that part."""
        stored = self._open(self._locations()[name]).get_slice(name)
        self._check_shape(name, stored.get_shape(), shape)
        return stored[index]

    def _check_shape(self, name: str, stored: Sequence[int], shape: tuple[int, ...]) -> None:
        if tuple(stored) != tuple(shape):
            raise CheckpointError(
                f"{self.path / self._locations()[name]}: {name} has shape {tuple(stored)} but config.json implies "
                f"{tuple(shape)}; use the config.json that belongs to these weights"
            )

    def _locations(self) -> dict[str, str]:
        """Return the file name of each tensor."""
        if self._file_of is None:
            if (self.path / INDEX).is_file():
                self._file_of = read_index(self.key, self.path / INDEX)
            elif (self.path / SINGLE).is_file():
                self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
            else:
                raise CheckpointError(
                    f"{self.path} has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported: convert the model"
                )
        return self._file_of

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            names = read_header(self.key, path)
            indexed = (self._file_of or {}).items()
            if missing := next(
                (name for name, tensor_file in indexed if tensor_file == file and name not in names), None
            ):
                raise CheckpointError(
                    f"{self.path / INDEX} places {missing!r} in {file}, which does not contain it; download {file} again"
                )
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or corrupt ({error}); download or export it again") from error
        return self._files[file]
