"""One run of an agent: its calls, joined into conversations, each a sample of tokens as they were sampled.

A call whose messages begin with those of an earlier call and its answer goes on from the tokens of that call. A call that
begins otherwise (another conversation, a history that the agent rewrote) begins a new sample; one that goes on from where
another already went on begins a new sample too, with what they share as its prompt, so that no token is trained on twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from slime_like.interfaces import Completion, Engine, GenerateContext, Sampling
from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.replies import AgentReply
from slime_like.rollout.agent.requests import ApiError, ChatRequest, identity, read_messages
from slime_like.rollout.agent.tool_calls import find_calls
from slime_like.rollout.collect.seeds import turn_seed
from slime_like.rollout.generate.episode import Episode
from slime_like.rollout.generate.trained_sampling import deviations
from slime_like.types import I32, Prompt, Reward, Sample, Status

MOST_SAMPLES = 1024  # of one run of an agent
BODY_FLOOR, BYTES_PER_TOKEN = 64 * 2**10, 16
FURTHER_IDS = 1 << 40  # ids of samples beyond a run's first: above those that a rollout counts


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered call: its conversation up to and with the answer, and where that ends in a sample's tokens."""

    messages: tuple[str, ...]  # identity of each
    tools: str
    episode: Episode
    length: int

    @property
    def is_last(self) -> bool:
        """Whether nothing went on from here yet."""
        return len(self.episode) == self.length


class Session:
    """Calls in, samples out. Belongs to one sample of a group, and to the engine that the group was given."""

    def __init__(self, engine: Engine, context: GenerateContext, renderer: Renderer, *, index: int, seed: int) -> None:
        self._engine, self._context, self._renderer = engine, context, renderer
        self._index, self._seed = index, seed
        self._turns: list[Turn] = []
        self._episodes: list[Episode] = []
        self._asked = 0
        self._text = ""  # of the newest answer
        self.ended: Status | None = None  # why calls are refused: no room is left, or the engine was told to abort
        self.failure: Exception | None = None  # of an engine or of this program, not of the agent
        self.overrides: dict[str, str] = {}  # sampling settings first asked for in vain, by name

    @property
    def num_calls(self) -> int:
        """Calls that were answered."""
        return len(self._turns)

    @property
    def most_bytes(self) -> int:
        """Largest body of a call: what is longer could not be a conversation of ``rollout.max_context_len`` tokens."""
        return max(BODY_FLOOR, BYTES_PER_TOKEN * self._context.max_context_len)

    async def answer(self, request: ChatRequest) -> AgentReply:
        """Sample an answer and record it. Raises ``ApiError`` on what cannot be served, ``EngineError`` as it comes."""
        self._refuse_aborted()
        self.ended = None  # there was no room, and it goes on elsewhere
        self._note_overrides(request)
        turn = self._extended(request)
        prompt_ids, between = self._prompt(request, turn)
        room = self._room(turn, prompt_ids, between)
        if room < 1:
            self._refuse(turn, len(prompt_ids) + len(between))
        sampling = self._sampling(request, room)
        number, self._asked = self._asked, self._asked + 1
        seed = turn_seed(self._seed, number)
        (completion,) = await self._engine.generate(np.concatenate([prompt_ids, between]), [seed], sampling)
        episode = self._record(turn, prompt_ids, between, completion)
        if completion.finish == "length" and sampling.max_new_tokens < room:
            episode.status = Status.COMPLETED  # it is the agent that wanted no more
        self._text = self._context.decode(completion.token_ids.tolist())
        if episode.status is Status.ABORTED:
            self.ended = Status.ABORTED
        self._refuse_aborted()
        return self._answered(request, completion, episode, number)

    def samples(self, prompt: Prompt, reward: Reward | None, status: Status | None) -> list[Sample]:
        """What was recorded, one sample per conversation, all of one episode; ``status`` in place of their own.

        A run that asked nothing is one failed sample: groups keep their size.
        """
        text = self._text
        if not self._episodes:
            empty = Episode(prompt.token_ids, self._context)
            empty.status = status or Status.FAILED
            return [replace(empty.sample(index=self._index, seed=self._seed, text=""), reward=reward)]
        found: list[Sample] = []
        for number, episode in enumerate(self._episodes):
            sample = episode.sample(index=self._index, seed=self._seed, text=text)
            further = FURTHER_IDS + sample.sample_id * MOST_SAMPLES + number
            sample_id = further if number else sample.sample_id
            found.append(replace(sample, sample_id=sample_id, reward=reward, status=status or sample.status))
        return found

    def _extended(self, request: ChatRequest) -> Turn | None:
        """The longest answered conversation that the request goes on from, one that nothing went on from if there is."""
        asked, tools = tuple(map(identity, request.messages)), _tools(request)

        def begins(turn: Turn) -> bool:
            return turn.tools == tools and turn.messages == asked[: len(turn.messages)]

        return max(filter(begins, self._turns), key=lambda turn: (len(turn.messages), turn.is_last), default=None)

    def _prompt(self, request: ChatRequest, turn: Turn | None) -> tuple[I32, I32]:
        """Tokens that are there already, and what is new after them."""
        if turn is None:
            return self._renderer.whole(request), np.zeros(0, dtype=np.int32)
        known = turn.episode.token_ids[: turn.length]
        between = self._renderer.after(request, len(turn.messages) - 1)
        ended = len(known) and len(between) and known[-1] == between[0]  # the answer's end was sampled
        return known, between[1:] if ended else between

    def _room(self, turn: Turn | None, prompt_ids: I32, between: I32) -> int:
        episode = turn.episode if turn is not None and turn.is_last else Episode(prompt_ids, self._context)
        context = self._context.max_context_len - len(prompt_ids) - len(between)
        return min(episode.room, context)

    def _refuse(self, turn: Turn | None, num_tokens: int) -> None:
        self.ended = Status.TRUNCATED
        if turn is not None and turn.is_last:
            turn.episode.status = Status.TRUNCATED
        raise ApiError(
            f"the conversation has {num_tokens} tokens, and nothing can be sampled after them: "
            f"rollout.max_context_len={self._context.max_context_len} tokens in all, of which "
            f"rollout.max_response_len={self._context.sampling.max_new_tokens} sampled",
            param="messages",
            code="context_length_exceeded",
        )

    def _refuse_aborted(self) -> None:
        if self.ended is Status.ABORTED:
            raise ApiError("the rollout was aborted", status=500, code="aborted")

    def _sampling(self, request: ChatRequest, room: int) -> Sampling:
        sampling = self._context.sampling
        stops = (*sampling.stop_token_ids, *map(self._renderer.stop_token, request.stop))
        return replace(sampling, max_new_tokens=min(room, request.max_tokens or room), stop_token_ids=stops)

    def _record(self, turn: Turn | None, prompt_ids: I32, between: I32, completion: Completion) -> Episode:
        """Append to the sample that ``turn`` ends, unless a call beside this one did in the meantime."""
        if turn is not None and turn.is_last:
            episode = turn.episode
        else:
            if len(self._episodes) == MOST_SAMPLES:
                raise ApiError(f"this run of an agent has begun {MOST_SAMPLES} conversations; no more are recorded")
            episode = Episode(prompt_ids, self._context)
            self._episodes.append(episode)
        episode.insert(between)
        episode.sampled(completion)
        return episode

    def _answered(self, request: ChatRequest, completion: Completion, episode: Episode, number: int) -> AgentReply:
        token_ids = completion.token_ids.tolist()
        called = find_calls(self._text) if request.tools else find_calls("")
        answer = AgentReply(
            answer_id=f"chatcmpl-{self._context.first_sample_id + self._index}-{number}",
            created=int(time.time()),
            request=request,
            completion=completion,
            pieces=tuple(self._context.tokenizer.decode([token]) for token in token_ids) if request.logprobs else (),
            content=called.content if called.calls else self._text,
            calls=tuple((f"call_{number}_{i}", *call) for i, call in enumerate(called.calls)),
            num_prompt_tokens=len(episode) - len(token_ids),
        )
        known = (*request.messages, *read_messages([answer.message]))  # as a client sends it back
        self._turns.append(Turn(tuple(map(identity, known)), _tools(request), episode, len(episode)))
        return answer

    def _note_overrides(self, request: ChatRequest) -> None:
        asked = {"temperature": request.temperature, "top_p": request.top_p}
        for name, (value, own) in deviations(self._context.sampling, asked).items():
            self.overrides.setdefault(name, f"{name}={value:g}, and was answered at {name}={own:g}")


def _tools(request: ChatRequest) -> str:
    """What a chat template puts at a conversation's start beside its messages."""
    return repr((request.tools, sorted(request.template_kwargs.items())))
