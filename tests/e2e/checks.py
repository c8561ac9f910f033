"""What must hold of any run that went well."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from slime_like.data.dump import load_groups, rollout_path
from slime_like.metrics import dictionary
from slime_like.types import Sample, Source
from tests.e2e.runs import Finished, last_step, metrics

# The gate of the tests stands here and nowhere else: no recipe can loosen it.
MAX_LOGPROB_DIFFERENCE = 1e-4


def check_consistency(rows: list[dict[str, Any]], *, cached: bool = True) -> None:
    """Engine and trainer agree at every push, and on every token of every step that the trainer's weights sampled.

    ``cached``: continuations start from cached prefixes. SGLang caches the states of a hybrid model at long intervals only,
    so that sequences as short as a test's are prefilled.
    """
    probes = [row[f"probe/{kind}logprob_abs_diff_max"] for row in rows for kind in ("", "decode_")]
    names = [f"train/train_rollout_logprob_abs_diff{kind}_max" for kind in ("", "_mixed")]
    drifts = [row[name] for row in rows for name in names if name in row]
    assert (min(row["probe/prefix_cache_hit_rate"] for row in rows) > 0.5) == cached
    assert drifts
    assert max([*probes, *drifts]) <= MAX_LOGPROB_DIFFERENCE


def check_skipped_push(run: Finished, run_dir: Path) -> None:
    """Check that ``weights.debug_skip_push_at=2`` ended the run before the step on the weights of that push."""
    assert run.code == 1
    assert "ConsistencyError: after the push of version 2 engine and trainer disagree" in run.output
    assert last_step(run_dir) == 1
    check_consistency(metrics(run_dir))


def check_documented(rows: list[dict[str, Any]]) -> None:
    """Every logged metric has an entry in the dictionary."""
    names = {name for row in rows for name in row} - {"step", "time", "spans", "warnings"}
    assert dictionary.unknown(names) == []


def check_guard(rows: list[dict[str, Any]]) -> None:
    """Check that the memory guard queried free memory under ``guard=auto``, and not at every collective.

    ``tests/distributed/test_query_schedule.py`` checks the budget under a simulated clock: here the machine's other work would count.
    """
    num_checks = sum(row.get("guard/checks", 0) for row in rows)
    num_calls = sum(
        value for row in rows for name, value in row.items() if name.startswith("comm/") and name.endswith("/calls")
    )
    assert 0 < num_checks < num_calls / 4, (num_checks, num_calls)
    assert sum(row.get("guard/time", 0.0) for row in rows) > 0


def check_export(run_dir: Path, rollout_id: int, versions: set[int], temperature: float) -> None:
    """Log-probabilities sampled under ``versions`` equal those of transformers on the run's exported weights."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    alike: defaultdict[int, list[Sample]] = defaultdict(list)  # by length: one call each, without padding
    for group in load_groups(rollout_path(run_dir / "rollouts", rollout_id)):
        for sample in group.samples:
            alike[len(sample.token_ids)].append(sample)
    compared = 0
    for samples in alike.values():
        ids_ST = torch.from_numpy(np.stack([sample.token_ids for sample in samples])).long()
        with torch.no_grad():
            columns_STV = torch.log_softmax(model(input_ids=ids_ST).logits / temperature, -1).numpy()
        for sample, columns_TV in zip(samples, columns_STV, strict=True):
            compared += _compare(sample, columns_TV, versions)
    assert compared > 50


def _compare(sample: Sample, columns_TV: npt.NDArray[np.float32], versions: set[int]) -> int:
    """Number of tokens sampled under ``versions``, each as likely as the row before it says."""
    compared = 0
    for span in sample.spans:
        if span.source is Source.MODEL and span.version in versions:
            at = np.arange(span.start, span.stop)
            mine = columns_TV[at - 1, sample.token_ids[at]]
            assert np.abs(mine - sample.logprobs[at]).max() <= MAX_LOGPROB_DIFFERENCE
            compared += len(at)
    return compared


def prompt_ids(run_dir: Path, num_rollouts: int) -> list[int]:
    """Prompts of all rollouts in the order they were trained on."""
    return [
        group.prompt.prompt_id
        for k in range(num_rollouts)
        for group in load_groups(rollout_path(run_dir / "rollouts", k))
    ]
