"""Checks that apply to every successful run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slime_like.data.dump import load_groups, rollout_path
from slime_like.metrics import dictionary
from slime_like.types import Sample, Source

# Tests take their tolerance from here and not from the config, so that no recipe can loosen it.
MAX_LOGPROB_DIFFERENCE = 1e-4


def check_consistency(rows: list[dict[str, Any]], *, cached: bool = True) -> None:
    """Check that engine and trainer agree at every push, and on every token that the trainer's weights sampled.

    With ``cached``, continuations must reuse cached prefixes. SGLang caches the states of a hybrid model only at long
    intervals, so the short sequences of a test are prefilled in full.
    """
    probes = [row[f"probe/{kind}logprob_abs_diff_max"] for row in rows for kind in ("", "decode_")]
    names = [f"train/train_rollout_logprob_abs_diff{kind}_max" for kind in ("", "_mixed")]
    drifts = [row[name] for row in rows for name in names if name in row]
    assert (min(row["probe/prefix_cache_hit_rate"] for row in rows) > 0.5) == cached
    assert drifts
    assert max([*probes, *drifts]) <= MAX_LOGPROB_DIFFERENCE


def check_documented(rows: list[dict[str, Any]]) -> None:
    """Check that every logged metric has an entry in the dictionary."""
    names = {name for row in rows for name in row} - {"step", "time", "spans", "warnings"}
    assert dictionary.unknown_names(names) == []


def check_guard(rows: list[dict[str, Any]]) -> None:
    """Check that the memory guard queried free memory under ``guard=auto``, and not at every collective.

    ``tests/distributed/test_query_schedule.py`` checks the budget under a simulated clock: here it would depend on the
    machine's load.
    """
    num_checks = sum(row.get("guard/checks", 0) for row in rows)
    num_calls = sum(
        value for row in rows for name, value in row.items() if name.startswith("comm/") and name.endswith("/calls")
    )
    assert 0 < num_checks < num_calls / 4, (num_checks, num_calls)
    assert sum(row.get("guard/time", 0.0) for row in rows) > 0


def check_export(run_dir: Path, rollout_id: int, versions: set[int], temperature: float) -> None:
    """Check that the engine's logprobs under ``versions`` equal those of transformers with the exported weights."""
    from transformers import AutoModelForCausalLM  # takes seconds

    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    # One call of the model per length needs no padding.
    samples_by_length: defaultdict[int, list[Sample]] = defaultdict(list)
    for group in load_groups(rollout_path(run_dir / "rollouts", rollout_id)):
        for sample in group.samples:
            samples_by_length[len(sample.token_ids)].append(sample)
    num_compared = 0
    for samples in samples_by_length.values():
        ids_ST = torch.from_numpy(np.stack([sample.token_ids for sample in samples])).long()
        with torch.no_grad():
            columns_STV = torch.log_softmax(model(input_ids=ids_ST).logits / temperature, -1).numpy()
        for sample, columns_TV in zip(samples, columns_STV, strict=True):
            num_compared += compare_logprobs(sample, columns_TV, versions)
    assert num_compared > 50


def compare_logprobs(sample: Sample, columns_TV: npt.NDArray[np.float32], versions: set[int]) -> int:
    """Return the number of tokens sampled under ``versions``; assert that each log-probability equals the model's."""
    num_compared = 0
    for span in sample.spans:
        if span.source is Source.MODEL and span.version in versions:
            positions = np.arange(span.start, span.stop)
            model_logprobs = columns_TV[positions - 1, sample.token_ids[positions]]
            assert np.abs(model_logprobs - sample.logprobs[positions]).max() <= MAX_LOGPROB_DIFFERENCE
            num_compared += len(positions)
    return num_compared


def prompt_ids(run_dir: Path, num_rollouts: int) -> list[int]:
    """Return the prompt ids of all rollouts in the order of training."""
    return [
        group.prompt.prompt_id
        for k in range(num_rollouts)
        for group in load_groups(rollout_path(run_dir / "rollouts", k))
    ]
