"""Columnar files of groups, for ``run.dump_rollouts``, ``run.replay_from`` and the leftover groups in checkpoints.

A file is an ``.npz`` without pickled objects: concatenated token columns, each sample's extras, one JSON text with all
other fields, and a digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slime_like.checkpoint.files import replacing
from slime_like.errors import DataError
from slime_like.types import I32, Prompt, Reward, Sample, SampleGroup, Source, Span, Status
from slime_like.util.reading import Count, InputFile, Int64, abbreviate, parse_json, typed

DIGEST = "digest"
FORMAT = 1


class _RewardEntry(NamedTuple):
    score: float
    accuracy: float | None
    parts: tuple[tuple[str, float], ...] = ()

    def reward(self) -> Reward:
        if not math.isfinite(self.score):
            raise ValueError(f"a reward is {self.score}")
        return Reward(*self)


@dataclass(frozen=True, slots=True)
class _PromptEntry:
    length: Count
    prompt_id: Int64
    text: str
    label: str | None
    rm_type: str | None
    metadata: dict[str, Any]
    dataset: str
    messages: tuple[dict[str, Any], ...] = ()

    def prompt(self, token_ids: I32) -> Prompt:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "length"}
        return Prompt(token_ids=token_ids, **values)


@dataclass(frozen=True, slots=True)
class _SampleEntry:
    length: Count
    episode_id: Int64
    sample_id: Int64
    seed: Int64
    spans: tuple[tuple[Int64, Int64, Source, Int64], ...]
    status: Status
    text: str
    reward: _RewardEntry | None


@dataclass(frozen=True, slots=True)
class _GroupEntry:
    group_id: Int64
    prompt: _PromptEntry
    samples: tuple[_SampleEntry, ...]


def digest(columns: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of all columns except the digest: names, dtypes, shapes and contents."""
    sha256 = hashlib.sha256()
    for name in sorted(columns.keys() - {DIGEST}):
        column = np.ascontiguousarray(columns[name])
        sha256.update(f"{name}\0{column.dtype.str}\0{column.shape}\0".encode())
        sha256.update(column.tobytes())
    return sha256.hexdigest()


def check_digest(columns: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if columns do not match their digest.

    Columns without a digest, written by older versions, are valid.
    """
    if DIGEST in columns and str(columns[DIGEST]) != digest(columns):
        raise ValueError("its columns do not match its digest")


def rollout_path(folder: Path, rollout_id: int) -> Path:
    """Return the file of rollout ``rollout_id`` in a folder of dumps."""
    return folder / f"rollout_{rollout_id:07d}.npz"


def save_groups(path: Path, groups: Sequence[SampleGroup]) -> None:
    """Write ``groups`` to ``path`` atomically, as ``write_columns`` does."""
    samples = [sample for group in groups for sample in group.samples]
    header = {"format": FORMAT, "groups": [_group_header(group) for group in groups]}
    columns = {
        "header": np.array(json.dumps(header)),
        "prompt_token_ids": _concatenate([group.prompt.token_ids for group in groups], np.int32),
        "token_ids": _concatenate([sample.token_ids for sample in samples], np.int32),
        "logprobs": _concatenate([sample.logprobs for sample in samples], np.float32),
    }
    for index, sample in enumerate(samples):
        columns |= {f"extra/{index}/{name}": value for name, value in sample.extras.items()}
    write_columns(path, columns)


def write_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Write arrays and their digest to ``path`` atomically, without waiting for the disk.

    Raises ``OSError`` if the file cannot be written.
    """
    with replacing(path) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **columns, **{DIGEST: np.array(digest(columns))})


def load_groups(path: Path) -> tuple[SampleGroup, ...]:
    """Read a file that ``save_groups`` wrote. Raises ``DataError`` naming it if it is missing, damaged or of another format."""
    if not path.exists():
        raise DataError(
            f"no dumped rollout at {path}: run.replay_from must be the rollouts folder of a run with run.dump_rollouts=true"
        )
    file = InputFile(path, fix="dump it again")
    try:
        columns = file.arrays()
        groups = _groups(columns)
        check_digest(columns)
        return groups
    except (ValueError, KeyError, AssertionError) as error:  # DataError is a ValueError
        raise error if isinstance(error, DataError) else file.refused(f"is not a dumped rollout ({error})") from error


def _groups(columns: dict[str, Any]) -> tuple[SampleGroup, ...]:
    """Return the groups in a file's arrays.

    Raises ``ValueError``, ``KeyError`` or ``AssertionError`` if they are of another format, incomplete or inconsistent.
    """
    values = parse_json(str(columns["header"]))
    file_format = values.get("format") if isinstance(values, dict) else None
    if file_format != FORMAT:
        raise ValueError(f"dump format {abbreviate(file_format)}, this version reads {FORMAT}")
    entries = typed(values.get("groups"), tuple[_GroupEntry, ...])
    samples = [item for entry in entries for item in entry.samples]
    prompt_ids = _split(columns, "prompt_token_ids", np.int32, [entry.prompt.length for entry in entries])
    token_ids = _split(columns, "token_ids", np.int32, [item.length for item in samples])
    logprobs = _split(columns, "logprobs", np.float32, [item.length for item in samples])
    extras = _extras(columns, len(samples))
    groups: list[SampleGroup] = []
    first = 0
    for entry, ids in zip(entries, prompt_ids, strict=True):
        stop = first + len(entry.samples)
        group_samples = [
            _sample(item, entry.group_id, (token_ids[k], logprobs[k]), extras.get(k, {}))
            for k, item in enumerate(entry.samples, first)
        ]
        groups.append(SampleGroup(entry.group_id, entry.prompt.prompt(ids), tuple(group_samples)))
        first = stop
    return tuple(groups)


def _split(columns: Mapping[str, Any], name: str, dtype: type, lengths: Sequence[int]) -> list[Any]:
    """Split column ``name`` into arrays of ``lengths``.

    Raises ``KeyError`` if the column is missing, ``ValueError`` if its dtype or size is wrong or it contains a negative token id.
    """
    column, total = columns[name], sum(lengths)
    if column.dtype != dtype or column.shape != (total,):
        raise ValueError(f"{name} is {column.dtype}{list(column.shape)}, not {np.dtype(dtype)}[{total}]")
    if dtype is np.int32 and len(column) and column.min() < 0:
        raise ValueError(f"{name} contains {column.min()}, which is not a token")
    return np.split(column, np.cumsum(lengths)[:-1]) if lengths else []


def _concatenate(arrays: Sequence[Any], dtype: type) -> Any:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _group_header(group: SampleGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "group_id": group.group_id,
        "prompt": {
            "length": len(prompt.token_ids),
            "prompt_id": prompt.prompt_id,
            "text": prompt.text,
            "label": prompt.label,
            "rm_type": prompt.rm_type,
            "metadata": dict(prompt.metadata),
            "dataset": prompt.dataset,
            "messages": [dict(message) for message in prompt.messages],
        },
        "samples": [
            {
                "length": len(sample.token_ids),
                "episode_id": sample.episode_id,
                "sample_id": sample.sample_id,
                "seed": sample.seed,
                "spans": [[span.start, span.stop, span.source.value, span.version] for span in sample.spans],
                "status": sample.status.value,
                "text": sample.text,
                "reward": None if sample.reward is None else _reward_entry(sample.reward),
            }
            for sample in group.samples
        ],
    }


def _reward_entry(reward: Reward) -> list[Any]:
    return [reward.score, reward.accuracy, [list(part) for part in reward.parts]]


def _extras(columns: Mapping[str, Any], num_samples: int) -> dict[int, dict[str, Any]]:
    """Return the extra arrays of each sample, as a dict from sample index to a dict from name to array.

    Raises ``ValueError`` if an array belongs to none of the ``num_samples`` samples of the file.
    """
    extras: dict[int, dict[str, Any]] = {}
    for key in columns:
        kind, _, path = key.partition("/")
        if kind == "extra":
            index, _, name = path.partition("/")
            if int(index) not in range(num_samples):
                raise ValueError(f"{key} belongs to none of its {num_samples} samples")
            extras.setdefault(int(index), {})[name] = columns[key]
    return extras


def _sample(item: _SampleEntry, group_id: int, columns_L: tuple[Any, Any], extras: dict[str, Any]) -> Sample:
    return Sample(
        group_id=group_id,
        episode_id=item.episode_id,
        sample_id=item.sample_id,
        seed=item.seed,
        token_ids=columns_L[0],
        logprobs=columns_L[1],
        extras=extras,
        spans=tuple(Span(start, stop, source, version) for start, stop, source, version in item.spans),
        status=item.status,
        text=item.text,
        reward=None if item.reward is None else item.reward.reward(),
    )
