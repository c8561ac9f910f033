"""Samples of several turns, proven by the token table: what is trained on is what the model sampled, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slime_like.algo.advantage import grpo
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.token_table import TokenTable, choose_samples, token_table
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source
from tests.engine.closeness import assert_close
from tests.engine.conftest import Engine, Models

TEMPERATURE = 0.7


def view_of(models: Models, prompt: Prompt, samples: Sequence[Sample]) -> TokenTable:
    """The token table of a group, scored by transformers in the trainer's place."""
    scored = tuple(replace(s, reward=s.reward or Reward(float(i % 2))) for i, s in enumerate(samples))
    group = SampleGroup(samples[0].group_id, prompt, scored)
    rows = choose_samples(assemble([group], AssembleSpec(grpo, "token_mean", 1, 1, 4096, 256), 0), [group], 4096)
    assert rows is not None
    logprobs = [
        np.append(np.float32(0), models.logprobs("A", rows.token_ids[a:b], TEMPERATURE))
        for a, b in zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], strict=True)
    ]
    return token_table(rows, np.concatenate(logprobs), 0)


def check_samples(engine: Engine, models: Models, prompt: Prompt, samples: Sequence[Sample]) -> None:
    """Recorded log-probabilities are the engine's own of these tokens and the trainer's; only the model's are trained on."""
    rescored = engine.run(engine.client.score([s.token_ids for s in samples], TEMPERATURE))
    for sample, scores in zip(samples, rescored, strict=True):
        mine = by_model(sample)
        assert_close(sample.logprobs[mine], np.append(np.nan, scores)[mine])
        assert np.isnan(sample.logprobs[~mine]).all()
    view = view_of(models, prompt, samples)
    known = {sample.sample_id: sample for sample in samples}
    for index, sample_id in enumerate(view.sample_ids):
        sample, place = known[int(sample_id)], view.sequence(index)
        mine = by_model(sample)
        np.testing.assert_array_equal(view.token_ids[place], sample.token_ids)
        np.testing.assert_array_equal(view.loss_weight[place] > 0, mine)
        np.testing.assert_array_equal(view.versions[place] >= 0, mine)
        np.testing.assert_array_equal(np.isnan(view.advantages[place]), ~mine)
        trainer, rollout = view.trainer_logprobs[place], view.rollout_logprobs[place]
        assert_close(trainer[mine], rollout[mine])


def by_model(sample: Sample) -> np.ndarray:
    """[L]: whether the model sampled the token."""
    return np.concatenate([np.full(s.stop - s.start, s.source is Source.MODEL) for s in sample.spans])
