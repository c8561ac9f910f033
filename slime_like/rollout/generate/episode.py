"""Episode that is built from the ids of sampled and inserted tokens.

Generate functions with several turns, tools or agents use it. Nothing is tokenised twice: the next turn's prompt
consists of the tokens of all earlier turns, as the engine sampled and read them.
"""

from __future__ import annotations

from dataclasses import replace

from slime_like.data.routing import ROUTED_EXPERTS
from slime_like.interfaces import Completion, GenerateContext, Sampling
from slime_like.rollout.generate.single_turn import STATUS
from slime_like.store.columns import TOOL_TOKEN, context_columns, sampled_columns
from slime_like.store.store import SampleStore, StoreRow
from slime_like.types import F32, I32, Sample, Span, Status


class Episode:
    """Tokens so far, the source of each token, and the number of tokens that may still be sampled.

    Example::

        episode = Episode(prompt.token_ids, context)
        (completion,) = await engine.generate(episode.token_ids, [seed], episode.sampling())
        episode.append(completion)  # trained on
        episode.insert(tokenize(context.tokenizer, ["a tool's reply"])[0])  # context only, not trained on
    """

    def __init__(self, prompt_ids: I32, context: GenerateContext) -> None:
        self._context = context
        store = SampleStore()
        self._row = StoreRow(store, store.add(context_columns(prompt_ids)))
        self._num_sampled = 0
        self.status = Status.COMPLETED

    def __len__(self) -> int:
        return len(self._row)

    @property
    def token_ids(self) -> I32:
        """All tokens so far [L], read-only."""
        return self._row.columns.token_ids

    @property
    def logprobs(self) -> F32:
        """Log-probability of each token [L], nan if it was not sampled, read-only."""
        return self._row.columns.logprobs

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of all tokens so far, each with its source and weight version."""
        return self._row.columns.spans()

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be sampled within ``rollout.max_response_len`` (all turns) and the context.

        It is 0 or negative if none may be sampled.
        """
        num_tokens = self._context.sampling.max_new_tokens - self._num_sampled
        return min(num_tokens, self._context.max_context_len - len(self))

    def sampling(self, *stop_token_ids: int) -> Sampling:
        """Return the sampling parameters of the next turn: ``stop_token_ids`` are added to the run's stop tokens.

        The maximum number of new tokens is ``remaining_tokens``, which must be above 0.
        """
        sampling = self._context.sampling
        return replace(
            sampling, max_new_tokens=self.remaining_tokens, stop_token_ids=(*sampling.stop_token_ids, *stop_token_ids)
        )

    def append(self, completion: Completion) -> None:
        """Append tokens that the model sampled after all tokens so far. They are trained on, in one span per weight version.

        This also sets ``status``, according to ``completion.finish``.
        """
        self._num_sampled += len(completion.token_ids)
        self.status = STATUS.get(completion.finish, Status.FAILED)
        sampled = sampled_columns(completion.token_ids, completion.logprobs, completion.versions)
        if completion.row is not None and self._is_continued_by(completion.row, len(sampled)):
            self._row.release()
            self._row = completion.row.fork()  # the group's store already has these tokens
        else:
            self._row.append(sampled, completion.routed_experts)

    def insert(self, token_ids: I32) -> None:
        """Append tokens of a tool or environment. The episode counts as truncated if no token may be sampled after them."""
        if len(token_ids):
            self._row.append(context_columns(token_ids, TOOL_TOKEN))
        if self.remaining_tokens < 1:
            self.status = Status.TRUNCATED

    def sample(self, *, index: int, seed: int, text: str) -> Sample:
        """Return the episode as sample ``index`` of its group. ``text`` is passed to the reward.

        Tool tokens beyond the context are cut off, since nothing was sampled after them.
        """
        columns = self._row.columns.slice(0, min(len(self), self._context.max_context_len))
        sample_id = self._context.first_sample_id + index
        return Sample(
            group_id=self._context.group_id,
            episode_id=sample_id,
            sample_id=sample_id,
            seed=seed,
            token_ids=columns.token_ids,
            logprobs=columns.logprobs,
            spans=columns.spans(),
            status=self.status,
            text=text,
            extras={} if columns.experts is None else {ROUTED_EXPERTS: columns.experts},
        )

    def _is_continued_by(self, row: StoreRow, num_sampled: int) -> bool:
        """Return whether ``row`` consists of the tokens so far and ``num_sampled`` new ones.

        Log-probabilities and versions of the tokens so far must be equal too.
        """
        columns = row.columns
        return len(columns) == len(self) + num_sampled and columns.begins_with(self._row.columns)
