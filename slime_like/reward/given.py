"""Reward ``given``: none of its own, for generate functions and agents that score each sample themselves."""

from __future__ import annotations

from slime_like.types import Prompt, Reward, Sample, Status


def given(prompt: Prompt, sample: Sample) -> Reward:
    """Called only where there is no score. Raises ``ValueError``.

    A sample that was cut off counts 0: whoever would have scored it did not get to its end.
    """
    if sample.status is Status.TRUNCATED:
        return Reward(0.0)
    raise ValueError(
        f"sample {sample.sample_id} of prompt {prompt.prompt_id} came without a reward, and reward.name=given computes none: "
        "let rollout.agent or rollout.generate score every sample, or name a reward that does"
    )
