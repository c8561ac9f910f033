"""Reward ``given``: no reward function, for generate functions and agents that score each sample themselves."""

from __future__ import annotations

from slime_like.types import Prompt, Reward, Sample, Status


def given(prompt: Prompt, sample: Sample) -> Reward:
    """Return a reward of 0 for a truncated sample, whose generate function or agent may have ended before scoring it.

    Raises ``ValueError`` for any other sample, since it should have been scored.
    """
    if sample.status is Status.TRUNCATED:
        return Reward(0.0)
    raise ValueError(
        f"sample {sample.sample_id} of prompt {prompt.prompt_id} has no reward, and reward.name=given computes none: "
        "score every sample in rollout.agent or rollout.generate, or set reward.name to a reward function"
    )
