"""Export of the trainer's weights with HF names and shapes: in buckets to engines, or to a folder."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_like.checkpoint.files import SCRATCH, fsync_path, publish
from slime_like.config.rules.quantised import CONFIG_KEY
from slime_like.config.rules.weight_files import INDEX, SINGLE
from slime_like.errors import CheckpointError
from slime_like.interfaces import Bucket, TensorMeta
from slime_like.train.megatron.families.base import Family, Weight
from slime_like.train.megatron.families.experts import keys_of_peers
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.model import OUTPUT, ModelSegments, named_weights
from slime_like.train.megatron.model_io.node_files import gather_files, is_node_leader, on_other_nodes
from slime_like.train.megatron.platform.collective import make_empty, on_rank_zero
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.util.by_bytes import by_bytes

FILE_BYTES = 4 << 30  # largest safetensors file of an export
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


class HFExport:
    """``WeightSource`` over the live parameters of one rank.

    The ranks of a tensor parallel group gather a parameter. If it belongs to a routed expert, it is gathered by the ranks that
    together hold one copy of a stage's experts. The first rank of a pipeline stage is its sender. Only the first stage sends
    tied embeddings. Vocabulary padding is removed.
    """

    def __init__(self, model: ModelSegments, family: Family, rank_info: RankInfo) -> None:
        self._rank_info = rank_info
        self.untrained_prefixes = family.untrained_prefixes
        table = family.weights()
        tied = bool(family.hf.tie_word_embeddings)
        # An expert's parameter has one weight per expert parallel rank, other parameters have one weight.
        self._weights: list[tuple[tuple[Weight, ...], Tensor]] = [
            (tuple(table[peer] for peer in keys_of_peers(key, family.num_experts, rank_info.layout.ep)), parameter)
            for key, parameter in named_weights(model)
            if not (tied and key == OUTPUT)
        ]

    @property
    def is_sender(self) -> bool:
        """True if this rank sends the gathered tensors of its pipeline stage."""
        return self._rank_info.tp_rank == self._rank_info.dp_rank == self._rank_info.cp_rank == 0

    def manifest(self) -> tuple[TensorMeta, ...]:
        """Return the metadata of the tensors that this rank's pipeline stage sends, in order."""
        return tuple(
            TensorMeta(name, shape, str(parameter.dtype).removeprefix("torch."))
            for weights, parameter in self._weights
            for name, shape in _entries(weights)
        )

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors of the manifest, in order, in buckets of at most ``max_bytes`` (or one larger tensor).

        Collective over the ranks of a stage: they iterate together and get the same number of buckets, which are empty
        on ranks that do not send. A tensor may share memory with the parameter: use it before the next optimizer step.
        """
        for group in by_bytes(self._stream(), max_bytes):
            yield Bucket(tuple(entry for entry in group if entry is not None))

    def replicated_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors of all stages on every rank, stage by stage, in buckets as in ``buckets``.

        Collective: all ranks iterate together. The tensor parallel and expert parallel groups gather the parameters of
        their stage, and the pipeline groups broadcast them.
        """
        rank_info = self._rank_info
        manifests: list[Any] = [self.manifest()]
        if rank_info.layout.pp > 1:
            manifests = [()] * rank_info.layout.pp
            dist.all_gather_object(manifests, self.manifest(), group=rank_info.pp_group)
        for stage, manifest in enumerate(manifests):
            stream = self._stream(replicated=True) if stage == rank_info.pp_rank else _empty(manifest, rank_info.device)
            for group in by_bytes(stream, max_bytes):
                bucket = Bucket(tuple(entry for entry in group if entry is not None))
                group.clear()
                if rank_info.layout.pp > 1:
                    _broadcast(bucket, stage, rank_info.pp_group)
                yield bucket
                del bucket  # before the next one is gathered

    def _stream(self, *, replicated: bool = False) -> Iterator[tuple[tuple[str, Tensor] | None, int]]:
        """Yield (entry, size in bytes) for each tensor. Collective over the ranks of a stage.

        An entry is (name, tensor) on the sender and, if ``replicated``, on every rank; otherwise None.
        """
        for weights, parameter in self._weights:
            tensors = self._gather(weights, parameter, replicated=replicated)
            for i, (name, shape) in enumerate(_entries(weights)):
                num_bytes = torch.Size(shape).numel() * parameter.element_size()
                yield (name, tensors[i]) if tensors else None, num_bytes

    @torch.no_grad()
    def _gather(self, weights: tuple[Weight, ...], parameter: Tensor, *, replicated: bool) -> tuple[Tensor, ...]:
        """Return the complete HF tensors of ``weights`` on the sender and, if ``replicated``, on every rank; otherwise ().

        Collective over the ranks of a stage.
        """
        rank_info = self._rank_info
        local = parameter.detach().contiguous()
        parts: list[Tensor] = []
        sizes = rank_info.layout
        if weights[0].is_expert:  # the sender is among the ranks of the first copy of the experts
            if replicated or rank_info.expert_dp_rank == 0:
                parts = all_gather(local, sizes.ep * sizes.etp, rank_info.expert_group)
        elif replicated or rank_info.dp_rank == rank_info.cp_rank == 0:
            parts = all_gather(local, sizes.tp if weights[0].is_split else 1, rank_info.tp_group)
        if not (replicated or self.is_sender):
            return ()
        shards = itertools.batched(parts, len(parts) // len(weights))  # the shards of each weight
        merged = (tensor for weight, split in zip(weights, shards, strict=True) for tensor in weight.merge(split))
        return tuple(tensor.contiguous() for tensor in merged)


def all_gather(local: Tensor, size: int, group: Any) -> list[Tensor]:
    """Return ``local`` of each of the ``size`` ranks of ``group``, in rank order. Collective unless ``size`` is 1."""
    if size == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(shards, local, group=group)
    return shards


def _empty(manifest: Sequence[TensorMeta], device: torch.device) -> Iterator[tuple[tuple[str, Tensor], int]]:
    """Yield ((name, uninitialised tensor), size in bytes) for each tensor of another stage's ``manifest``."""
    for meta in manifest:
        dtype: torch.dtype = getattr(torch, meta.dtype)
        num_bytes = torch.Size(meta.shape).numel() * dtype.itemsize
        yield (meta.name, torch.empty(meta.shape, dtype=dtype, device=device)), num_bytes


def _broadcast(bucket: Bucket, stage: int, group: Any) -> None:
    """Broadcast the tensors of one stage to all ranks of a pipeline group. Collective."""
    for _, tensor in bucket.tensors:
        dist.broadcast(tensor, group=group, group_src=stage)


def _entries(weights: tuple[Weight, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of every HF tensor, in order."""
    return [entry for weight in weights for entry in zip(weight.names, weight.shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class _RankFiles:
    """The files that one rank has written."""

    weight_map: dict[str, str]  # file name of each tensor
    num_bytes: int
    error: str | None


def write_hf(
    export: HFExport, source: HFFolder, folder: Path, rank_info: RankInfo, max_bytes: int = FILE_BYTES
) -> None:
    """Write an HF folder that transformers and SGLang load: safetensors, config.json and the source's other files.

    Untrained tensors of the source (a vision tower, multi-token prediction) are copied unchanged, except that float8
    weights are converted to the dtype of the export, which is not quantised. Every pipeline stage writes its own files,
    of at most ``max_bytes`` (or one larger tensor), into a temporary folder, which then replaces ``folder``.
    Collective. Raises ``CheckpointError`` on every rank if a file cannot be written, copied from the source or sent between
    nodes (the temporary folder is then removed), or if ``folder`` exists and either is the source's folder or contains no
    config.json. After an error, ``folder`` is unchanged.
    """
    scratch = folder.with_name(folder.name + SCRATCH)

    def prepare() -> None:
        if folder.exists() and (folder.resolve() == source.path.resolve() or not (folder / "config.json").is_file()):
            raise CheckpointError(
                f"{folder} exists and is not an earlier export, so it is not replaced: choose another folder to export to"
            )
        make_empty(scratch)

    def finish() -> None:
        errors = [f"rank {rank}: {files.error}" for rank, files in enumerate(files_of_ranks) if files.error is not None]
        try:
            if errors:
                raise _export_error(folder, "; ".join(errors))
            weight_map = {name: file for files in files_of_ranks for name, file in files.weight_map.items()}
            untrained_names = [name for name in _names_of(source, export.untrained_prefixes) if name not in weight_map]
            dtype = export.manifest()[0].dtype
            copied_map, num_bytes = _copy_untrained(scratch, source, untrained_names, max_bytes, getattr(torch, dtype))
            num_bytes += sum(files.num_bytes for files in files_of_ranks)
            _write_metadata(scratch, weight_map | copied_map, num_bytes, source, dtype)
            publish(scratch, folder)
        except (CheckpointError, OSError, SafetensorError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, SafetensorError):
                raise _export_error(folder, str(error)) from error
            raise

    on_rank_zero(prepare)
    on_other_nodes(lambda: make_empty(scratch), rank_info)
    files_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files_of_ranks, _write_files(export, scratch, rank_info, max_bytes))
    if all(files.error is None for files in files_of_ranks):
        try:
            gather_files(scratch, [sorted(set(files.weight_map.values())) for files in files_of_ranks], rank_info)
        except CheckpointError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise _export_error(folder, str(error)) from error
    elif is_node_leader(rank_info) and dist.get_rank() != 0:  # rank 0 removes its own in ``finish``
        shutil.rmtree(scratch, ignore_errors=True)
    on_rank_zero(finish)


def _export_error(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder}: the export failed ({reason}); is the disk full?")


def _write_files(export: HFExport, scratch: Path, rank_info: RankInfo, max_bytes: int) -> _RankFiles:
    """Write this rank's tensors. Collective.

    After a failed write, the rank writes nothing more, but still takes part. The result contains the error.
    """
    weight_map: dict[str, str] = {}
    num_bytes = 0
    error: str | None = None
    for i, bucket in enumerate(export.buckets(max_bytes)):
        if not bucket.tensors or error is not None:
            continue
        file = f"model-stage{rank_info.pp_rank}-{i:05d}.safetensors"
        tensors = {name: tensor.cpu().clone() for name, tensor in bucket.tensors}
        try:
            save_file(tensors, scratch / file, metadata={"format": "pt"})
            fsync_path(scratch / file)
        except (SafetensorError, OSError) as failure:
            error = f"{file}: {failure}"
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(map(_num_bytes, tensors.values()))
    return _RankFiles(weight_map, num_bytes, error)


def _names_of(source: HFFolder, prefixes: tuple[str, ...]) -> list[str]:
    return [name for name in source.names() if name.startswith(prefixes)] if prefixes else []


def _copy_untrained(
    scratch: Path, source: HFFolder, names: Sequence[str], max_bytes: int, dtype: torch.dtype
) -> tuple[dict[str, str], int]:
    """Copy the tensors ``names`` of ``source`` into new files of at most ``max_bytes`` in the folder ``scratch``.

    A larger tensor has a file of its own. Float8 weights are converted to ``dtype``. Return a dict from tensor names to
    file names, and the total number of bytes of the tensors.
    """
    weight_map: dict[str, str] = {}
    entries = ((name, source.read_as_stored(name, dtype)) for name in names)
    num_bytes = 0
    for i, group in enumerate(by_bytes(((entry, _num_bytes(entry[1])) for entry in entries), max_bytes)):
        file = f"model-carried-{i:05d}.safetensors"
        save_file(dict(group), scratch / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys((name for name, _ in group), file)
        num_bytes += sum(_num_bytes(tensor) for _, tensor in group)
    return weight_map, num_bytes


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_metadata(scratch: Path, weight_map: dict[str, str], num_bytes: int, source: HFFolder, dtype: str) -> None:
    """Write config.json and the index of the weight files, and copy the source's other files.

    If there is only one weight file, rename it to ``SINGLE`` instead of writing an index.
    """
    files = sorted(set(weight_map.values()))
    if len(files) == 1:
        (scratch / files[0]).rename(scratch / SINGLE)
    else:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (scratch / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file in sorted(source.path.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, scratch / file.name)
    config = {k: v for k, v in source.raw_config.items() if k not in ("torch_dtype", CONFIG_KEY)} | {"dtype": dtype}
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
