"""Several turns: the environment rejects a wrong answer, and the model tries again.

Set ``rollout.generate=examples.second_try:generate``. The function scores its own samples: the reward of a correct answer
decreases with each try. Any environment that replies to a turn with text can be written like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_like.data.chat import tokenize
from slime_like.interfaces import Engine, GenerateContext
from slime_like.reward.kinds import label_of
from slime_like.rollout.generate.episode import Episode
from slime_like.types import Prompt, Reward, Sample, Status
from slime_like.util.concurrency import gather_or_cancel

MAX_TURNS = 3
DISCOUNT = 0.5  # per further try
WRONG = "\nThat is not right. Try again.\n"


async def generate(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Return one scored episode of up to ``MAX_TURNS`` turns per seed. Rows need a label."""
    label = label_of(prompt).strip()
    feedback = tokenize(context.tokenizer, [WRONG])[0]

    async def play(index: int, seed: int) -> Sample:
        episode, text, score = Episode(prompt.token_ids, context), "", 0.0
        for turn in range(MAX_TURNS):
            (completion,) = await engine.generate(episode.token_ids, [seed], episode.sampling())
            episode.append(completion)
            text = context.decode(completion.token_ids.tolist()).strip()
            if text == label:
                score = DISCOUNT**turn
                break
            if episode.status is not Status.COMPLETED or turn == MAX_TURNS - 1:
                break
            episode.insert(feedback)
            if not episode.remaining_tokens > 0:
                break
        reward = Reward(score, accuracy=float(score > 0.0))
        return replace(episode.sample(index=index, seed=seed, text=text), reward=reward)

    return await gather_or_cancel([play(index, seed) for index, seed in enumerate(seeds)])
