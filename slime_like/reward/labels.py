"""Label of a prompt, for rewards that compare with it."""

from __future__ import annotations

from slime_like.types import Prompt


def label_of(prompt: Prompt) -> str:
    """Return the label. Raises ``ValueError`` without one: such rows are refused when the data is read."""
    if prompt.label is None:
        raise ValueError(f"prompt {prompt.prompt_id} of {prompt.dataset} has no label")
    return prompt.label
