"""Metrics and answers of held-out sets, computed from their scored groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slime_like.metrics.types import Last, Metric
from slime_like.types import Reward, Sample, SampleGroup, Status


@dataclass(frozen=True, slots=True)
class EvalAnswer:
    """One sample of a held-out prompt in human-readable form, without token ids."""

    dataset: str
    prompt_id: int
    sample_id: int
    prompt: str
    label: str | None
    response: str
    score: float | None
    accuracy: float | None
    status: str
    response_len: int  # tokens


@dataclass(frozen=True, slots=True)
class SampleScore:
    """Values of one sample that evaluation metrics use."""

    accuracy: float  # score if the reward has no accuracy
    response_len: int  # tokens
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Scored samples of one held-out prompt, without tokens."""

    position: int  # of the prompt in its dataset
    scores: tuple[SampleScore, ...]  # one per episode, so that an episode with several samples counts once
    answers: tuple[EvalAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagerEvaluation:
    """Evaluation of the held-out prompts of one rollout manager."""

    results: Mapping[str, tuple[PromptResult, ...]]  # of the prompts, by dataset
    metrics: tuple[Metric, ...]  # of the reward pool


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of one evaluation of all held-out sets."""

    metrics: tuple[Metric, ...] = ()
    answers: tuple[EvalAnswer, ...] = ()


def merge_evaluations(parts: Sequence[ManagerEvaluation]) -> EvalResult:
    """Merge the evaluations of all managers, with the prompts of each held-out set in their original order."""
    metrics: list[Metric] = []
    answers: list[EvalAnswer] = []
    for name in parts[0].results:
        results = sorted((r for part in parts for r in part.results[name]), key=lambda result: result.position)
        metrics += eval_metrics(name, results)
        answers += [answer for result in results for answer in result.answers]
    return EvalResult((*metrics, *(metric for part in parts for metric in part.metrics)), tuple(answers))


def prompt_result(name: str, group: SampleGroup, *, with_answers: bool) -> PromptResult:
    """Return the result of one prompt of held-out set ``name``. The id of ``group`` is the prompt's position in the set."""
    scores = tuple(
        SampleScore(_accuracy(sample.reward), sample.num_response_tokens, sample.status is Status.TRUNCATED)
        for sample in _episodes(group)
    )
    return PromptResult(group.group_id, scores, eval_answers(name, group) if with_answers else ())


def eval_answers(name: str, group: SampleGroup) -> tuple[EvalAnswer, ...]:
    """Return one table row per sample of a prompt of held-out set ``name``."""
    return tuple(
        EvalAnswer(
            dataset=name,
            prompt_id=group.prompt.prompt_id,
            sample_id=sample.sample_id,
            prompt=group.prompt.text,
            label=group.prompt.label,
            response=sample.text,
            score=None if sample.reward is None else sample.reward.score,
            accuracy=None if sample.reward is None else sample.reward.accuracy,
            status=str(sample.status),
            response_len=sample.num_response_tokens,
        )
        for sample in group.samples
    )


def eval_metrics(name: str, results: Sequence[PromptResult]) -> tuple[Metric, ...]:
    """Return metrics ``eval/<name>*``: mean accuracy (mean score if the reward has no accuracy), pass@k, truncation, lengths.

    The metrics have the same names as in slime. Without ``results``, return none. For pass@k, a sample is correct if its
    accuracy is 1 or, if it has no accuracy, its score is 1.
    """
    scores = [score for result in results for score in result.scores]
    if not scores:
        return ()
    lengths = np.array([score.response_len for score in scores], dtype=np.float64)
    per_prompt = [[score.accuracy for score in result.scores] for result in results]
    values: dict[str, float] = {
        "": float(np.mean(np.concatenate(per_prompt))),
        "-truncated_ratio": float(np.mean([score.is_truncated for score in scores])),
        "/response_len/mean": float(lengths.mean()),
        "/response_len/median": float(np.median(lengths)),
        "/response_len/max": float(lengths.max()),
        "/response_len/min": float(lengths.min()),
    }
    is_correct = [[accuracy == 1.0 for accuracy in accuracies] for accuracies in per_prompt]
    values |= {f"-pass@{k}": value for k, value in mean_pass_at_k(is_correct).items()}
    return tuple(Last(f"eval/{name}{suffix}", value) for suffix, value in values.items())


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate ``1 - C(n - c, k) / C(n, k)`` of pass@k, computed as a product that does not overflow.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1. Example: ``pass_at_k(4, 1, 2) == 0.5``.
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    num_incorrect = num_samples - num_correct
    if num_incorrect < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_incorrect + 1, num_samples + 1)))


def mean_pass_at_k(is_correct: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Return a dict from k to the mean pass@k over prompts.

    k is each power of two up to the smallest number of samples per prompt. The dict is empty if a prompt has one
    sample, since pass@1 is the accuracy. ``is_correct[p][i]`` is True if sample i of prompt p is correct.
    """
    min_samples = min((len(samples) for samples in is_correct), default=0)
    if min_samples < 2:
        return {}
    ks = [2**i for i in range(min_samples.bit_length())]
    return {k: float(np.mean([pass_at_k(len(samples), sum(samples), k) for samples in is_correct])) for k in ks}


def _episodes(group: SampleGroup) -> list[Sample]:
    """Return the first sample of each episode, so that an episode with several samples counts once."""
    first: dict[int, Sample] = {}
    for sample in group.samples:
        first.setdefault(sample.episode_id, sample)
    return list(first.values())


def _accuracy(reward: Reward | None) -> float:
    assert reward is not None, "groups are scored before they are evaluated"
    return reward.score if reward.accuracy is None else reward.accuracy
