"""Base class of model families: layer pattern, TransformerConfig fields, and the mapping between HF tensors and parameters.

Parameters have slime_like's keys, numbered by decoder block (``blocks.3.self_attention.linear_qkv.weight``). megatron's
names depend on model class and pipeline stage; ``model.named_weights`` converts them to these keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from slime_like.config.schema.names import FAMILIES
from slime_like.errors import ConfigError
from slime_like.registry import resolve
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.util.vocabulary import padded_vocabulary

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight(ABC):
    """One megatron parameter: the HF tensors that it holds (names and shapes), and its split over tensor parallel ranks."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @abstractmethod
    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        """Return the shard that rank ``rank`` of ``tp`` ranks holds of the complete HF ``tensors``."""

    @abstractmethod
    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the HF tensors, in order, from the shards of all tensor parallel ranks."""

    def read(self, folder: HFFolder) -> list[Tensor]:
        """Read the HF tensors from ``folder``. Raises ``CheckpointError`` as ``HFFolder.tensor`` does."""
        return [folder.tensor(name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]

    @property
    def is_split(self) -> bool:
        """True if tensor parallel ranks hold different shards."""
        return True

    @property
    def is_expert(self) -> bool:
        """True for a parameter of a routed expert. It is split over expert tensor parallel instead of tensor parallel ranks."""
        return False


@dataclass(frozen=True, slots=True)
class Replicated(Weight):
    """A parameter that is equal on every tensor parallel rank, such as a norm."""

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return tensors[0]

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)

    @property
    def is_split(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class RowParallel(Weight):
    """A parameter split along the input dimension, such as an output projection."""

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return tensors[0].chunk(tp, 1)[rank]

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), 1),)


@dataclass(frozen=True, slots=True)
class Stacked(Weight):
    """One or more tensors, such as gate and up, stacked along the output dimension; each is split over the ranks.

    All tensors have the same size.
    """

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return torch.cat([t.chunk(tp, 0)[rank] for t in tensors], 0)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        columns = zip(*(shard.chunk(len(self.names), 0) for shard in shards), strict=True)
        return tuple(torch.cat(column, 0) for column in columns)


@dataclass(frozen=True, slots=True)
class QKV(Weight):
    """Query, key and value rows, interleaved by query group: q heads of group 0, k 0, v 0, q heads of group 1, and so on."""

    groups: int

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        by_group = torch.cat([t.view(self.groups, -1, *t.shape[1:]) for t in tensors], 1)
        return by_group.chunk(tp, 0)[rank].flatten(0, 1)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        by_group = torch.cat(list(shards), 0).unflatten(0, (self.groups, -1))
        rows = [shape[0] // self.groups for shape in self.shapes]
        return tuple(part.flatten(0, 1) for part in by_group.split(rows, 1))


@dataclass(frozen=True, slots=True)
class Vocabulary(Weight):
    """A parameter with one row per token of the vocabulary, such as the embedding, split by rows.

    Zero rows pad it to ``padded`` rows, so that every rank holds the same number.
    """

    padded: int

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        num_missing = self.padded - tensors[0].shape[0]
        padded = torch.nn.functional.pad(tensors[0], (0, 0, 0, num_missing))
        return padded.chunk(tp, 0)[rank]

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), 0)[: self.shapes[0][0]],)


def family_class(name: str) -> type[Family]:
    """Return the class registered for ``name`` in ``FAMILIES``."""
    return resolve("model.family", name, {name: FAMILIES[name].path})


class Family(ABC):
    """Mapping of an HF ``model_type`` to megatron. One instance per model."""

    untrained_prefixes: tuple[str, ...] = ()
    """Name prefixes of the HF tensors that are not trained; an export copies these tensors from the source folder."""
    output_norms: ClassVar[bool] = False
    """True if a norm follows attention and MLP, before the residual is added."""
    projection_norms: ClassVar[bool] = False
    """True if a norm of queries or keys is over all heads, not over each head."""
    shape_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the HF config that a checkpoint's fingerprint has for this family, besides those that it has for every family."""

    def __init__(self, hf: Any, tp: int) -> None:
        """Store the transformers config ``hf`` and the tensor parallel size.

        Subclasses raise ``ConfigError`` if the trainer does not support a setting of ``hf``, or if ``tp`` does not divide
        a size of the model.
        """
        self.hf = hf
        self.tp = tp

    @abstractmethod
    def blocks(self) -> tuple[str, ...]:
        """Return the two layer symbols of each decoder block in megatron's HybridModel: ``*-`` is attention, then MLP."""

    @abstractmethod
    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of megatron's TransformerConfig that the HF config determines."""

    @abstractmethod
    def weights(self) -> dict[str, Weight]:
        """Return the weights by parameter key."""

    @property
    def num_experts(self) -> int:
        """Number of routed experts in each block with experts; 0 if no block has experts."""
        return 0

    def require(self, key: str, *allowed: Any) -> None:
        """Raise ``ConfigError`` if the HF config sets ``key`` to a value other than the ``allowed`` ones."""
        value = getattr(self.hf, key, allowed[0])
        if value not in allowed:
            self.refuse(f"{key}={value!r}", " or ".join(repr(a) for a in allowed))

    def refuse(self, variant: str, allowed: str) -> NoReturn:
        """Raise ``ConfigError`` saying that ``variant`` is unsupported, and that the trainer supports only ``allowed``."""
        raise ConfigError(
            f"config.json: {variant} of a {self.hf.model_type} model is not supported: the trainer supports only {allowed}; train "
            "another model"
        )

    def require_divisible(self, key: str, size: int | None = None) -> None:
        """Raise ``ConfigError`` unless ``parallel.tp`` divides ``size``, by default the HF config's ``key``."""
        value = int(getattr(self.hf, key)) if size is None else size
        if value % self.tp:
            raise ConfigError(
                f"parallel.tp={self.tp} does not divide the model's {key}={value}: set parallel.tp to a divisor of {value}"
            )

    @property
    def head_dim(self) -> int:
        """Size of an attention head: ``head_dim`` of config.json, or hidden_size / num_attention_heads."""
        return int(getattr(self.hf, "head_dim", None) or self.hf.hidden_size // self.hf.num_attention_heads)

    @property
    def padded_vocabulary(self) -> int:
        """Number of rows, including padding, that the embedding and the output layer each have on all ranks together."""
        return padded_vocabulary(int(self.hf.vocab_size), self.tp)
