"""Groups on disk, columnar: what ``run.dump_rollouts`` writes, ``run.replay_from`` reads, and a checkpoint's leftover is.

One ``.npz`` without pickled objects: token columns end to end, and one JSON text for everything else.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.errors import DataError
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span, Status

FORMAT = 1


def rollout_path(folder: Path, rollout_id: int) -> Path:
    """Where rollout ``rollout_id`` lies in a folder of dumps."""
    return folder / f"rollout_{rollout_id:07d}.npz"


def save_groups(path: Path, groups: Sequence[SampleGroup]) -> None:
    """Write ``groups`` to ``path``, whole or not at all."""
    samples = [sample for group in groups for sample in group.samples]
    header = {"format": FORMAT, "groups": [_group_header(group) for group in groups]}
    columns = {
        "header": np.array(json.dumps(header)),
        "prompt_token_ids": _cat([group.prompt.token_ids for group in groups], np.int32),
        "token_ids": _cat([sample.token_ids for sample in samples], np.int32),
        "logprobs": _cat([sample.logprobs for sample in samples], np.float32),
    }
    for index, sample in enumerate(samples):
        columns |= {f"extra/{index}/{name}": value for name, value in sample.extras.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **columns)
    partial.replace(path)


def load_groups(path: Path) -> tuple[SampleGroup, ...]:
    """Read what ``save_groups`` wrote. Raises ``DataError`` naming the file when it is missing or not such a file."""
    try:
        with np.load(path, allow_pickle=False) as columns:
            header = json.loads(str(columns["header"]))
            prompts, tokens, logprobs = columns["prompt_token_ids"], columns["token_ids"], columns["logprobs"]
            extras = _extras(columns)
    except FileNotFoundError as error:
        raise DataError(
            f"no dumped rollout at {path}: run.replay_from must be the rollouts folder of a run with run.dump_rollouts=true"
        ) from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a dumped rollout ({error}): dump it again") from error
    if header.get("format") != FORMAT:
        raise DataError(f"{path} has dump format {header.get('format')!r}, this version reads {FORMAT}: dump it again")
    groups: list[SampleGroup] = []
    prompt_at = token_at = index = 0
    for entry in header["groups"]:
        prompt_end = prompt_at + entry["prompt"]["length"]
        samples: list[Sample] = []
        for item in entry["samples"]:
            token_end = token_at + item["length"]
            columns_L = (tokens[token_at:token_end], logprobs[token_at:token_end])
            samples.append(_sample(item, entry["group_id"], columns_L, extras.get(index, {})))
            token_at, index = token_end, index + 1
        groups.append(
            SampleGroup(entry["group_id"], _prompt(entry["prompt"], prompts[prompt_at:prompt_end]), tuple(samples))
        )
        prompt_at = prompt_end
    return tuple(groups)


def _cat(arrays: Sequence[Any], dtype: type) -> Any:
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


def _reward(score: float, accuracy: float | None, parts: Sequence[tuple[str, float]] = ()) -> Reward:
    return Reward(score, accuracy, tuple((name, value) for name, value in parts))


def _prompt(entry: dict[str, Any], token_ids: Any) -> Prompt:
    fields = {name: value for name, value in entry.items() if name not in ("length", "messages")}
    return Prompt(token_ids=token_ids, messages=tuple(entry.get("messages", ())), **fields)


def _extras(columns: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Extra arrays of each sample, by its place in the file."""
    found: dict[int, dict[str, Any]] = {}
    for key in columns:
        kind, _, rest = key.partition("/")
        if kind == "extra":
            index, _, name = rest.partition("/")
            found.setdefault(int(index), {})[name] = columns[key]
    return found


def _sample(item: dict[str, Any], group_id: int, columns_L: tuple[Any, Any], extras: dict[str, Any]) -> Sample:
    return Sample(
        group_id=group_id,
        episode_id=item["episode_id"],
        sample_id=item["sample_id"],
        seed=item["seed"],
        token_ids=columns_L[0],
        logprobs=columns_L[1],
        extras=extras,
        spans=tuple(Span(start, stop, Source(source), version) for start, stop, source, version in item["spans"]),
        status=Status(item["status"]),
        text=item["text"],
        reward=None if item["reward"] is None else _reward(*item["reward"]),
    )
