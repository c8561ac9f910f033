"""Reward ``given``: none of its own, for generate functions and agents that score each sample themselves."""

from __future__ import annotations

from slime_like.types import Prompt, Reward, Sample


def given(prompt: Prompt, sample: Sample) -> Reward:
    """Called only where there is no score. Raises ``ValueError``."""
    raise ValueError(
        f"sample {sample.sample_id} of prompt {prompt.prompt_id} came without a reward, and reward.name=given computes none: "
        "let rollout.agent or rollout.generate score every sample, or name a reward that does"
    )
