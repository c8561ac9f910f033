"""Supervised fine-tuning data: the label of each row is the response. Same batches, same trainer, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slime_like.data.chat import Tokenizer, tokenize
from slime_like.data.prompts import FileSource
from slime_like.errors import ConfigError, DataError
from slime_like.types import I32, Prompt, Reward, Sample, SampleGroup, Source, Span, Status


class Demonstrations:
    """Groups of one sample: prompt tokens, label tokens, end-of-sequence token. Labels are tokenised once.

    The cursor is the source's: ``source.state()`` resumes it. Raises at construction ``DataError`` for a row whose
    label is missing or does not fit the context, ``ConfigError`` for a tokenizer without an end-of-sequence token.
    """

    def __init__(self, source: FileSource, tokenizer: Tokenizer, max_context_len: int) -> None:
        if not isinstance(tokenizer.eos_token_id, int):
            folder = tokenizer.name_or_path or "model.hf_checkpoint"
            raise ConfigError(
                f"the tokenizer in {folder!r} has no eos_token, so a demonstration cannot end; "
                f"set eos_token in its tokenizer_config.json"
            )
        self._source = source
        labels = tokenize(tokenizer, [prompt.label or "" for prompt in source.prompts])
        end = np.array([tokenizer.eos_token_id], dtype=np.int32)
        self._responses: dict[int, I32] = {}
        for prompt, label_ids in zip(source.prompts, labels, strict=True):
            if not len(label_ids):
                raise DataError(
                    f"{source.location(prompt.prompt_id)}: label missing, and algo=sft trains on it; "
                    f"add it, or set data.label_key to its column"
                )
            total = len(prompt.token_ids) + len(label_ids) + 1
            if total > max_context_len:
                raise DataError(
                    f"{source.location(prompt.prompt_id)}: prompt, label and end-of-sequence token are {total} tokens "
                    f"and do not fit rollout.max_context_len={max_context_len}; shorten the row or raise the key"
                )
            self._responses[prompt.prompt_id] = np.concatenate([label_ids, end])

    def next(self, n: int, first_group_id: int) -> list[SampleGroup]:
        """The next ``n`` demonstrations as groups numbered from ``first_group_id``."""
        return [self._group(prompt, first_group_id + i) for i, prompt in enumerate(self._source.next(n))]

    def state(self) -> dict[str, Any]:
        """The source's cursor."""
        return self._source.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self._source.load_state(state)

    def _group(self, prompt: Prompt, group_id: int) -> SampleGroup:
        response = self._responses[prompt.prompt_id]
        token_ids = np.concatenate([prompt.token_ids, response])
        split = len(prompt.token_ids)
        sample = Sample(
            group_id=group_id,
            episode_id=0,
            sample_id=group_id,
            seed=0,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), dtype=np.float32),  # nobody sampled it: no policy to correct for
            spans=(Span(0, split, Source.PROMPT), Span(split, len(token_ids), Source.MODEL)),
            status=Status.COMPLETED,
            text=prompt.label or "",
            reward=Reward(0.0),
        )
        return SampleGroup(group_id, prompt, (sample,))
