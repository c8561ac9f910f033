"""Record one run of an agent: join its calls into conversations, each of which becomes a sample with the sampled tokens.

A call whose messages begin with the messages and the answer of an earlier call, and which has the same tools and template
arguments, continues from that call's tokens. Any other call (a new conversation, or a history that the agent rewrote) starts
a new sample. A second continuation of the same answer starts a new sample too: the shared tokens become the new sample's
prompt, so that no token is trained on twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from slime_like.interfaces import Completion, Engine, GenerateContext, Sampling
from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.replies import AgentReply
from slime_like.rollout.agent.requests import ApiError, ChatRequest, Message
from slime_like.rollout.agent.tool_calls import find_calls
from slime_like.rollout.collect.sampler import deviations, turn_seed
from slime_like.rollout.generate.episode import Episode
from slime_like.types import I32, Prompt, Reward, Sample, Status

MAX_SAMPLES = 1024  # per run of an agent
BODY_FLOOR, BYTES_PER_TOKEN = 64 * 2**10, 16
FURTHER_IDS = 1 << 40  # ids of an agent run's second and later samples start here, above all ordinary sample ids


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered call: its conversation including the answer, and the sample that contains the conversation's tokens."""

    messages: tuple[str, ...]  # identity of each
    tools: str
    episode: Episode
    length: int  # number of tokens of the episode up to the end of the answer

    @property
    def ends_episode(self) -> bool:
        """Return whether this answer is the end of its episode so far.

        If it is, a call that continues this turn extends the episode; otherwise, such a call starts a new one.
        """
        return len(self.episode) == self.length


class Session:
    """Converter of one agent run's calls into samples. Bound to one seed of a group and to the group's engine."""

    def __init__(self, engine: Engine, context: GenerateContext, renderer: Renderer, *, index: int, seed: int) -> None:
        self._engine, self._context, self._renderer = engine, context, renderer
        self._index, self._seed = index, seed
        self._turns: list[Turn] = []
        self._episodes: list[Episode] = []
        self._num_requests = 0
        self._text = ""  # text of the newest answer
        self.end_status: Status | None = None  # why calls are refused: the context is full, or the engine aborted
        self.failure: Exception | None = None  # error of an engine or of this program, not of the agent
        self.overrides: dict[str, str] = {}  # requested sampling settings that were ignored, by name

    @property
    def num_calls(self) -> int:
        """Number of answered calls."""
        return len(self._turns)

    @property
    def max_body_bytes(self) -> int:
        """Size limit of a request body: a larger one is assumed to exceed ``rollout.max_context_len`` tokens."""
        return max(BODY_FLOOR, BYTES_PER_TOKEN * self._context.max_context_len)

    async def answer(self, request: ChatRequest) -> AgentReply:
        """Sample an answer and record it.

        Raises ``ApiError`` if the request is refused or the engine aborted it, ``ConfigError`` if the chat template cannot
        continue a conversation, and the engine's error if sampling fails.
        """
        self._refuse_aborted()
        self.end_status = None  # an earlier conversation was full; this call may belong to another one
        self._note_overrides(request)
        turn = self._find_continued(request)
        prompt_ids, between = self._prompt(request, turn)
        max_tokens = self._max_tokens(turn, prompt_ids, between)
        if max_tokens < 1:
            self._refuse(turn, len(prompt_ids) + len(between))
        sampling = self._sampling(request, max_tokens)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        seed = turn_seed(self._seed, number)
        (completion,) = await self._engine.generate(np.concatenate([prompt_ids, between]), [seed], sampling)
        episode = self._record(turn, prompt_ids, between, completion)
        if completion.finish == "length" and sampling.max_new_tokens < max_tokens:
            episode.status = Status.COMPLETED  # the agent set this limit, not the run
        self._text = self._context.decode(completion.token_ids)
        if episode.status is Status.ABORTED:
            self.end_status = Status.ABORTED
        self._refuse_aborted()
        return self._to_reply(request, completion, episode, number)

    def samples(self, prompt: Prompt, reward: Reward | None, status: Status | None) -> list[Sample]:
        """Return the recorded samples, one per conversation, all with the same ``episode_id``.

        Each has the ``reward``. ``status``, if not None, overrides the status of each sample. If no answer was recorded,
        return one sample, so that groups keep their size; without a ``status``, its status is ``end_status``, or failed if that
        is None.
        """
        text = self._text
        if not self._episodes:
            empty = Episode(prompt.token_ids, self._context)
            empty.status = status or self.end_status or Status.FAILED
            return [replace(empty.sample(index=self._index, seed=self._seed, text=""), reward=reward)]
        samples: list[Sample] = []
        for number, episode in enumerate(self._episodes):
            sample = episode.sample(index=self._index, seed=self._seed, text=text)
            further_id = FURTHER_IDS + sample.sample_id * MAX_SAMPLES + number
            sample_id = further_id if number else sample.sample_id
            samples.append(replace(sample, sample_id=sample_id, reward=reward, status=status or sample.status))
        return samples

    def _find_continued(self, request: ChatRequest) -> Turn | None:
        """Return the turn with the longest conversation that the request continues; None if it continues no turn.

        Among turns with equal conversations, a turn that has not been continued takes precedence.
        """
        messages, tools = tuple(message.identity() for message in request.messages), _tools(request)

        def begins(turn: Turn) -> bool:
            return turn.tools == tools and turn.messages == messages[: len(turn.messages)]

        return max(filter(begins, self._turns), key=lambda turn: (len(turn.messages), turn.ends_episode), default=None)

    def _prompt(self, request: ChatRequest, turn: Turn | None) -> tuple[I32, I32]:
        """Return the prompt in two parts: the tokens up to and including the answer of ``turn``, and the new tokens after it.

        The first part consists of recorded tokens. Without ``turn``, it is instead the entire conversation, and the second
        part is empty.
        """
        if turn is None:
            return self._renderer.conversation(request), np.zeros(0, dtype=np.int32)
        earlier_ids = turn.episode.token_ids[: turn.length]
        between = self._renderer.after_answer(request, len(turn.messages) - 1)
        end_was_sampled = (
            len(earlier_ids) and len(between) and earlier_ids[-1] == between[0]
        )  # do not insert the end-of-answer token twice
        return earlier_ids, between[1:] if end_was_sampled else between

    def _max_tokens(self, turn: Turn | None, prompt_ids: I32, between: I32) -> int:
        sampling, context = self._context.sampling, self._context.max_context_len - len(prompt_ids) - len(between)
        return min(
            turn.episode.remaining_tokens if turn is not None and turn.ends_episode else sampling.max_new_tokens,
            context,
        )

    def _refuse(self, turn: Turn | None, num_tokens: int) -> None:
        self.end_status = Status.TRUNCATED
        if turn is not None and turn.ends_episode:
            turn.episode.status = Status.TRUNCATED
        raise ApiError(
            f"the conversation has {num_tokens} tokens, and nothing can be sampled after them: "
            f"the limits are rollout.max_context_len={self._context.max_context_len} tokens in total and "
            f"rollout.max_response_len={self._context.sampling.max_new_tokens} sampled tokens",
            param="messages",
            code="context_length_exceeded",
        )

    def _refuse_aborted(self) -> None:
        if self.end_status is Status.ABORTED:
            raise ApiError("the rollout was aborted", status=500, code="aborted")

    def _sampling(self, request: ChatRequest, max_tokens: int) -> Sampling:
        sampling = self._context.sampling
        stops = (*sampling.stop_token_ids, *map(self._renderer.stop_token, request.stop))
        return replace(
            sampling, max_new_tokens=min(max_tokens, request.max_sampled_tokens or max_tokens), stop_token_ids=stops
        )

    def _record(self, turn: Turn | None, prompt_ids: I32, between: I32, completion: Completion) -> Episode:
        """Append ``between`` and the completion to the sample that ends with ``turn`` or, if none does, to a new sample.

        A new sample begins with ``prompt_ids``.

        Raises ``ApiError`` if the run would have more than ``MAX_SAMPLES`` samples.
        """
        if turn is not None and turn.ends_episode:
            episode = turn.episode
        else:
            if len(self._episodes) == MAX_SAMPLES:
                raise ApiError(f"this run of an agent has begun {MAX_SAMPLES} conversations; no more are recorded")
            episode = Episode(prompt_ids, self._context)
            self._episodes.append(episode)
        episode.insert(between)
        episode.append(completion)
        return episode

    def _to_reply(self, request: ChatRequest, completion: Completion, episode: Episode, number: int) -> AgentReply:
        tool_calls = find_calls(self._text) if request.tools else find_calls("")
        answer = AgentReply(
            answer_id=f"chatcmpl-{self._context.first_sample_id + self._index}-{number}",
            created=int(time.time()),
            request=request,
            completion=completion,
            pieces=self._pieces(completion) if request.logprobs else (),
            content=tool_calls.content if tool_calls.calls else self._text,
            calls=tuple((f"call_{number}_{i}", *call) for i, call in enumerate(tool_calls.calls)),
            num_prompt_tokens=len(episode) - len(completion.token_ids),
        )
        messages = (*request.messages, Message.model_validate(answer.message))  # as a client sends it back
        self._turns.append(
            Turn(tuple(message.identity() for message in messages), _tools(request), episode, len(episode))
        )
        return answer

    def _pieces(self, completion: Completion) -> tuple[str, ...]:
        """Return the text of each sampled token."""
        return tuple(self._context.tokenizer.decode([token]) for token in completion.token_ids.tolist())

    def _note_overrides(self, request: ChatRequest) -> None:
        requested = {"temperature": request.temperature, "top_p": request.top_p}
        for name, (value, run_value) in deviations(self._context.sampling, requested).items():
            self.overrides.setdefault(name, f"{name}={value:g} but got {name}={run_value:g}")


def _tools(request: ChatRequest) -> str:
    """Return a text that is equal for requests with equal tools and template arguments.

    Templates may render both before the messages.
    """
    return repr((request.tools, sorted(request.chat_template_kwargs.items())))
