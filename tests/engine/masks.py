"""Checks of multi-turn samples: in the token table, exactly the tokens that the model sampled are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slime_like.algo.advantage import grpo
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.token_table import TokenTable, choose_samples, token_table
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source
from tests.engine.closeness import assert_close
from tests.engine.conftest import Models, RunningEngine

TEMPERATURE = 0.7


def view_of(models: Models, prompt: Prompt, samples: Sequence[Sample]) -> TokenTable:
    """Return the token table of a group, with scores of transformers in place of the trainer's."""
    scored_samples = tuple(replace(s, reward=s.reward or Reward(float(i % 2))) for i, s in enumerate(samples))
    group = SampleGroup(samples[0].group_id, prompt, scored_samples)
    micro_batch = choose_samples(assemble([group], AssembleSpec(grpo, "token_mean", 1, 1, 4096, 256), 0), [group], 4096)
    assert micro_batch is not None
    logprobs = [
        np.append(np.float32(0), models.logprobs("A", micro_batch.token_ids[a:b], TEMPERATURE))
        for a, b in zip(micro_batch.cu_seqlens[:-1], micro_batch.cu_seqlens[1:], strict=True)
    ]
    return token_table(micro_batch, np.concatenate(logprobs), 0)


def check_samples(engine: RunningEngine, models: Models, prompt: Prompt, samples: Sequence[Sample]) -> None:
    """Assert that logprobs agree with the engine and with transformers, and that only sampled tokens are trained on."""
    scores_of_samples = engine.run(engine.client.score([s.token_ids for s in samples], TEMPERATURE))
    for sample, scores in zip(samples, scores_of_samples, strict=True):
        is_sampled = sampled_mask(sample)
        assert_close(sample.logprobs[is_sampled], np.append(np.nan, scores)[is_sampled])
        assert np.isnan(sample.logprobs[~is_sampled]).all()
    view = view_of(models, prompt, samples)
    samples_by_id = {sample.sample_id: sample for sample in samples}
    for index, sample_id in enumerate(view.sample_ids):
        sample, positions = samples_by_id[int(sample_id)], view.sequence(index)
        is_sampled = sampled_mask(sample)
        np.testing.assert_array_equal(view.token_ids[positions], sample.token_ids)
        np.testing.assert_array_equal(view.loss_weight[positions] > 0, is_sampled)
        np.testing.assert_array_equal(view.versions[positions] >= 0, is_sampled)
        np.testing.assert_array_equal(np.isnan(view.advantages[positions]), ~is_sampled)
        trainer, rollout = view.trainer_logprobs[positions], view.rollout_logprobs[positions]
        assert_close(trainer[is_sampled], rollout[is_sampled])


def sampled_mask(sample: Sample) -> np.ndarray:
    """Return an [L] mask of the tokens that the model sampled."""
    return np.concatenate([np.full(s.stop - s.start, s.source is Source.MODEL) for s in sample.spans])
