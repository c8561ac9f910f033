"""Several turns: an answer that is not the label is called wrong, and the model may try again.

``rollout.generate=slime_like.examples.second_try:generate``. It scores by itself: a right answer counts less the more tries
it took. Any environment that answers a turn with text is written like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_like.data.chat import tokenize
from slime_like.interfaces import Engine, GenerateContext
from slime_like.reward.labels import label_of
from slime_like.rollout.generate.episode import Episode
from slime_like.types import Prompt, Reward, Sample, Status
from slime_like.util.together import together

MOST_TURNS = 3
WORTH = 0.5  # of a try in comparison with the one before
WRONG = "\nThat is not right. Try again.\n"


async def generate(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """One episode of up to ``MOST_TURNS`` turns per seed, scored. Rows need a label."""
    label = label_of(prompt).strip()
    feedback = tokenize(context.tokenizer, [WRONG])[0]

    async def play(index: int, seed: int) -> Sample:
        episode, text, score = Episode(prompt.token_ids, context), "", 0.0
        for turn in range(MOST_TURNS):
            (completion,) = await engine.generate(episode.token_ids, [seed], episode.sampling())
            episode.sampled(completion)
            text = context.decode(completion.token_ids.tolist()).strip()
            if text == label:
                score = WORTH**turn
                break
            if episode.status is not Status.COMPLETED or turn == MOST_TURNS - 1:
                break
            episode.insert(feedback)
            if not episode.room > 0:
                break
        reward = Reward(score, accuracy=float(score > 0.0))
        return replace(episode.sample(index=index, seed=seed, text=text), reward=reward)

    return await together([play(index, seed) for index, seed in enumerate(seeds)])
