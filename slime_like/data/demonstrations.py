"""Supervised fine-tuning data: labels of rows, or assistant turns of conversations. No engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from slime_like.data.chat import tokenize, tokenizer_folder
from slime_like.data.conversations import Conversations, MaskedTokens, is_conversation
from slime_like.data.prompts import FileSource
from slime_like.data.user_source import UserFileSource
from slime_like.errors import ConfigError, DataError, UserCodeError
from slime_like.interfaces import Tokenizer
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span, Status


class Demonstrations:
    """Source of one-sample groups: prompt, label and end-of-sequence token, or a conversation in the chat template.

    Rows are tokenised once. ``source`` keeps the position of the next row. The constructor raises ``DataError`` for a row that
    is longer than the context or is neither labelled nor a conversation, and for a conversation that ``Conversations.mark``
    refuses. It raises ``ConfigError`` if the tokenizer is unsuitable, for example because it has no end-of-sequence token.
    """

    def __init__(
        self,
        source: FileSource | UserFileSource,
        tokenizer: Tokenizer,
        max_context_len: int,
        conversations: Conversations | None = None,
    ) -> None:
        if not isinstance(tokenizer.eos_token_id, int):
            raise ConfigError(
                f"the tokenizer in {tokenizer_folder(tokenizer)!r} has no eos_token, so a demonstration cannot end; "
                f"set eos_token in its tokenizer_config.json"
            )
        self._source = source
        self._max_context_len = max_context_len
        self._rows: dict[int, MaskedTokens] = {}
        conversations = conversations or Conversations(tokenizer)
        for prompt in source.prompts:
            if is_conversation(prompt.messages):
                location = source.location(prompt.prompt_id)
                row = conversations.mark(prompt.messages, prompt.metadata.get("tools"), location)
                self._add(prompt, row, "conversation is")
        labelled = [prompt for prompt in source.prompts if prompt.prompt_id not in self._rows]
        labels = tokenize(tokenizer, [prompt.label or "" for prompt in labelled])
        end = np.array([tokenizer.eos_token_id], dtype=np.int32)
        for prompt, label_ids in zip(labelled, labels, strict=True):
            if not len(label_ids):
                raise DataError(
                    f"{source.location(prompt.prompt_id)}: label missing, and algo=sft trains on it; "
                    f"add it, or set data.label_key to its column"
                )
            token_ids = np.concatenate([prompt.token_ids, label_ids, end])
            trained = np.arange(len(token_ids)) >= len(prompt.token_ids)
            self._add(prompt, MaskedTokens(token_ids, trained), "prompt, label and end-of-sequence token are")

    def _add(self, prompt: Prompt, row: MaskedTokens, subject: str) -> None:
        """Store a row. Raises ``DataError`` if it is too long; ``subject`` is the subject of the error message."""
        if len(row.token_ids) > self._max_context_len:
            raise DataError(
                f"{self._source.location(prompt.prompt_id)}: {subject} {len(row.token_ids)} tokens "
                f"long, more than rollout.max_context_len={self._max_context_len}; shorten the row or raise rollout.max_context_len"
            )
        self._rows[prompt.prompt_id] = row

    def next(self, num_groups: int, first_group_id: int) -> list[SampleGroup]:
        """Return the next ``num_groups`` demonstrations as groups numbered from ``first_group_id``.

        Raises ``UserCodeError`` if a user's source fails or returns a prompt that is not in its ``prompts``.
        """
        return [self._group(prompt, first_group_id + i) for i, prompt in enumerate(self._source.next(num_groups))]

    def state(self) -> Mapping[str, object]:
        """Return the source's cursor."""
        return self._source.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the cursor ``state``."""
        self._source.load_state(state)

    def _group(self, prompt: Prompt, group_id: int) -> SampleGroup:
        row = self._rows.get(prompt.prompt_id)
        if row is None:
            raise UserCodeError(
                f"data.source returned prompt {prompt.prompt_id} from next, which is none of its prompts: return only prompts of its "
                "attribute prompts"
            )
        sample = Sample(
            group_id=group_id,
            episode_id=0,
            sample_id=group_id,
            seed=0,
            token_ids=row.token_ids,
            logprobs=np.zeros(len(row.token_ids), dtype=np.float32),  # not sampled, so there is no behaviour policy
            spans=tuple(_spans(row)),
            status=Status.COMPLETED,
            text=prompt.label or "",
            reward=Reward(0.0),
        )
        return SampleGroup(group_id, prompt, (sample,))


def _spans(row: MaskedTokens) -> Iterator[Span]:
    """Yield a row's spans: trained tokens as MODEL, untrained tokens at the start as PROMPT, other untrained tokens as TOOL."""
    edges = [0, *(np.flatnonzero(np.diff(row.trained)) + 1).tolist(), len(row.trained)]
    for start, stop in pairwise(edges):
        if row.trained[start]:
            yield Span(start, stop, Source.MODEL)
        else:
            yield Span(start, stop, Source.TOOL if start else Source.PROMPT)
