"""Tool calls inside an answer: the model writes ``<calc>12+34</calc>``, reads ``<result>46</result>`` and continues.

Set ``rollout.generate=examples.calculator:generate``, as +recipe=quickstart_tool does. Tokens written by
the model are trained on, those of the calculator are not. Text is never tokenised twice: a call ends at one token, which
stops the engine; its result is tokenised and appended; the engine continues from exactly these token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from examples.arithmetic import calculate
from slime_like.data.chat import tokenize
from slime_like.errors import ConfigError
from slime_like.interfaces import Completion, Engine, GenerateContext, Tokenizer
from slime_like.rollout.generate.episode import Episode
from slime_like.types import I32, Prompt, Sample
from slime_like.util.concurrency import gather_or_cancel

CALL, CALL_END = "<calc>", "</calc>"
MAX_CALLS = 4


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Tokens that start and end a call."""

    start: int
    stop: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallTokens:
        """Look up the tokens of ``CALL`` and ``CALL_END`` in ``tokenizer``.

        Raises ``ConfigError`` unless each of them is a single token: engines stop at single tokens only.
        """
        ids = tokenize(tokenizer, [CALL, CALL_END])
        for text, token_ids in zip((CALL, CALL_END), ids, strict=True):
            if len(token_ids) != 1:
                raise ConfigError(
                    f"model.hf_checkpoint: its tokenizer writes {text} with {len(token_ids)} tokens, and the calculator example "
                    f"stops at one; add {CALL} and {CALL_END} to the tokenizer as special tokens"
                )
        return cls(int(ids[0][0]), int(ids[1][0]))

    def call_in(self, token_ids: I32) -> I32 | None:
        """Return the tokens of the call that ends a turn; None if the turn does not end with a call."""
        starts = np.flatnonzero(token_ids == self.start)
        if not len(starts) or int(token_ids[-1]) != self.stop:
            return None
        return token_ids[starts[-1] + 1 : -1]


async def generate(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Return one sample per seed; at most ``MAX_CALLS`` calls of a sample get a result.

    The first turns go to the engine as one group. Raises ``ConfigError`` as ``CallTokens.of`` does.
    """
    tokens = CallTokens.of(context.tokenizer)
    firsts = await engine.generate(prompt.token_ids, seeds, Episode(prompt.token_ids, context).sampling(tokens.stop))

    async def answer(index: int, seed: int, first: Completion) -> Sample:
        episode, last = Episode(prompt.token_ids, context), first
        episode.append(last)
        for _ in range(MAX_CALLS):
            call_ids = tokens.call_in(last.token_ids) if last.finish == "stop" else None
            if call_ids is None:
                break
            episode.insert(result(context, call_ids))
            if not episode.remaining_tokens > 0:
                break
            (last,) = await engine.generate(episode.token_ids, [seed], episode.sampling(tokens.stop))
            episode.append(last)
        final = "" if tokens.call_in(last.token_ids) is not None else context.decode(last.token_ids.tolist())
        return episode.sample(index=index, seed=seed, text=final)

    return await gather_or_cancel(
        [answer(i, seed, first) for i, (seed, first) in enumerate(zip(seeds, firsts, strict=True))]
    )


def result(context: GenerateContext, call_ids: I32) -> I32:
    """Return the token ids of the calculator's reply, which is an error if ``calculate`` rejects the call."""
    try:
        value = calculate(context.decode(call_ids.tolist()))
    except ValueError:
        value = "error"
    return tokenize(context.tokenizer, [f"<result>{value}</result>"])[0]
