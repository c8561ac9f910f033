"""Episode under construction: sampled tokens and inserted tokens, token ids verbatim.

Used by generate functions with several turns, tools or agents. Nothing is tokenised twice: the next turn's prompt
consists of the tokens of all earlier turns, as the engine sampled and read them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slime_like.data.routing import routing_column
from slime_like.interfaces import Completion, GenerateContext, Sampling
from slime_like.rollout.generate.single_turn import STATUS
from slime_like.types import F32, I32, RoutedExperts, Sample, Source, Span, Status


class Episode:
    """Tokens so far, the source of each token, and the number of tokens that may still be sampled.

    Example::

        episode = Episode(prompt.token_ids, context)
        (completion,) = await engine.generate(episode.token_ids, [seed], episode.sampling())
        episode.sampled(completion)  # trained on
        episode.insert(tokenize(context.tokenizer, ["a tool's reply"])[0])  # context only, not trained on
    """

    def __init__(self, prompt_ids: I32, context: GenerateContext) -> None:
        self._context = context
        self.token_ids: I32 = np.asarray(prompt_ids, dtype=np.int32)  # [L]
        self.logprobs: F32 = np.full(len(prompt_ids), np.nan, dtype=np.float32)  # [L]
        self.spans: tuple[Span, ...] = (Span(0, len(prompt_ids), Source.PROMPT),)
        self.status = Status.COMPLETED
        self._routed_experts: RoutedExperts | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def room(self) -> int:
        """Number of tokens that may still be sampled within ``rollout.max_response_len`` (all turns) and the context."""
        sampled = sum(span.stop - span.start for span in self.spans if span.source is Source.MODEL)
        return min(self._context.sampling.max_new_tokens - sampled, self._context.max_context_len - len(self))

    def sampling(self, *stop_token_ids: int) -> Sampling:
        """Return the settings of the next turn: at most ``room`` tokens, which must not be 0, and additional stop tokens."""
        sampling = self._context.sampling
        return replace(sampling, max_new_tokens=self.room, stop_token_ids=(*sampling.stop_token_ids, *stop_token_ids))

    def sampled(self, completion: Completion) -> None:
        """Append tokens that the model sampled after all tokens so far: one span per weight version, trained on."""
        start = len(self)
        self._append(completion.token_ids, completion.logprobs)
        self.spans += tuple(Span(start + a, start + b, Source.MODEL, version) for a, b, version in completion.versions)
        self.status = STATUS.get(completion.finish, Status.FAILED)
        self._routed_experts = completion.routed_experts  # of the tokens of earlier turns too

    def insert(self, token_ids: I32) -> None:
        """Append tokens of a tool or an environment; the episode is truncated if they fill the remaining space."""
        if len(token_ids):
            start = len(self)
            self._append(token_ids, np.full(len(token_ids), np.nan, dtype=np.float32))
            self.spans += (Span(start, len(self), Source.TOOL),)
        if self.room < 1:
            self.status = Status.TRUNCATED

    def sample(self, *, index: int, seed: int, text: str) -> Sample:
        """Return the episode as sample ``index`` of its group. ``text`` is passed to the reward.

        Tool tokens beyond the context are cut off, since nothing was sampled after them.
        """
        length = min(len(self), self._context.max_context_len)
        sample_id = self._context.first_sample_id + index
        return Sample(
            group_id=self._context.group_id,
            episode_id=sample_id,
            sample_id=sample_id,
            seed=seed,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            spans=tuple(replace(span, stop=min(span.stop, length)) for span in self.spans if span.start < length),
            status=self.status,
            text=text,
            extras=routing_column(self._routed_experts, length),
        )

    def _append(self, token_ids: I32, logprobs: F32) -> None:
        self.token_ids = np.concatenate([self.token_ids, token_ids]).astype(np.int32, copy=False)
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32, copy=False)
