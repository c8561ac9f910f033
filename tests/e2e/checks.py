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
from slime_like.distributed.guard.pace import OVERDRAFT
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


def check_guard(rows: list[dict[str, Any]], ranks: int = 1) -> None:
    """The memory guard asked, and took what ``guard=auto`` promises: a thousandth of the time, and ``OVERDRAFT`` questions.

    Of all steps but the first together, as the budget is. Questions that a busy machine interrupted, which fewer later ones
    pay for when a run is longer, count by the median of the steps' prices. A run of fewer questions than may be overdrawn
    shows less, so one that was not interrupted costs a thousandth of a step at most.
    """
    told = [row for row in rows if "guard/time" in row and "perf/step_time" in row]
    steady = [row for row in told[1:] if not row["guard/clears"]]  # to clear is no question
    assert len(told) > 3
    assert sum(row["guard/checks"] for row in told) > 0
    times, steps = ([row[name] for row in steady] for name in ("guard/time", "perf/step_time"))
    asked = [row["guard/checks"] / ranks for row in steady]  # by a rank; the time is that of the slowest
    prices = [time / count for time, count in zip(times, asked, strict=True) if count] or [0.0]
    price, seen = float(np.median(prices)), f"questions {asked}, times {times}, steps {steps}"
    assert min(sum(times), sum(asked) * price) <= 0.001 * sum(steps) + OVERDRAFT * price, seen
    assert min(prices) <= 0.001 * np.median(steps), seen


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
