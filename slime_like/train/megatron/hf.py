"""A folder in HF format: config, tokenizer files and safetensors, read with every fault named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_like.errors import CheckpointError
from slime_like.imports import without_model_classes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFFolder:
    """A local HF checkpoint. Raises ``CheckpointError`` naming file and fix on anything missing, torn or foreign."""

    def __init__(self, path: str | Path, key: str = "model.hf_checkpoint") -> None:
        self.path = Path(path)
        self.key = key
        if not self.path.is_dir():
            raise CheckpointError(f"{key}={path}: no such folder; give a local folder in HF format")
        self.raw_config: dict[str, Any] = self._json(self.path / "config.json")
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] | None = None

    def config(self) -> Any:
        """The transformers config object."""
        from transformers import AutoConfig

        try:
            with without_model_classes():
                return AutoConfig.from_pretrained(str(self.path), local_files_only=True)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{self.path / 'config.json'}: transformers cannot read it ({reason})") from error

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor ``name`` on the CPU; ``shape`` is what config.json implies."""
        where = self._locations()
        if name not in where:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is missing; config.json describes another model, or the checkpoint is incomplete"
            )
        tensor: Tensor = self._open(where[name]).get_tensor(name)
        self._check_shape(name, tensor.shape, shape)
        return tensor

    def names(self) -> list[str]:
        """Every tensor, in order of name."""
        return sorted(self._locations())

    def stored(self, name: str) -> Tensor:
        """Tensor ``name`` of ``names()`` as it lies there."""
        tensor: Tensor = self._open(self._locations()[name]).get_tensor(name)
        return tensor

    def has(self, name: str) -> bool:
        """Whether the folder holds tensor ``name``."""
        return name in self._locations()

    def part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        """``tensor(name, shape)[index]``, of which only that part is read."""
        found = self._open(self._locations()[name]).get_slice(name)
        self._check_shape(name, found.get_shape(), shape)
        return found[index]

    def _check_shape(self, name: str, found: Sequence[int], shape: tuple[int, ...]) -> None:
        if tuple(found) != tuple(shape):
            raise CheckpointError(
                f"{self.path / self._locations()[name]}: {name} has shape {tuple(found)} but config.json implies "
                f"{tuple(shape)}; use the config.json that belongs to these weights"
            )

    def _locations(self) -> dict[str, str]:
        """Tensor name -> file name."""
        if self._where is None:
            if (self.path / INDEX).is_file():
                weight_map = self._json(self.path / INDEX).get("weight_map")
                if not isinstance(weight_map, dict):
                    raise CheckpointError(f"{self.path / INDEX}: no 'weight_map'; download the checkpoint again")
                self._where = {str(k): str(v) for k, v in weight_map.items()}
            elif (self.path / SINGLE).is_file():
                self._where = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
            else:
                raise CheckpointError(
                    f"{self.path}: neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read"
                )
        return self._where

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, but {INDEX} names it; download the checkpoint again")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or corrupt ({error}); download or export it again") from error
        return self._files[file]

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; {self.key} must be a folder in HF format") from None
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: not a JSON object")
        return value
