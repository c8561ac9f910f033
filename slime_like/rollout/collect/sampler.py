"""Sampling of one scored group from one prompt: engine, generate function, reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from slime_like.config.schema import names
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import UserCodeError
from slime_like.interfaces import GenerateContext, GenerateFn, Generator, Sampling, TokenIds, Tokenizer
from slime_like.metrics.types import Metric
from slime_like.registry import resolve
from slime_like.reward.pool import RewardPool
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.resumable import PauseGate, ResumableEngine, sample_seeds
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import RequestCounts
from slime_like.types import UNTRAINED, Prompt, Sample, SampleGroup
from slime_like.util.concurrency import gather_or_cancel
from slime_like.util.user_code import name_user_errors

TRAIN_STREAM = "train"  # stream of sampling seeds; each held-out set has its own


def open_generate(config: RolloutConfig) -> GenerateFn:
    """Return ``rollout.generate``: a function, or an instance of a class, which may own servers and connections."""
    target = resolve("rollout.generate", config.generate, names.GENERATE)
    return target(config) if isinstance(target, type) else target


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for ``num_samples`` samples of ``prompt``. Stream, group id and the run's seed determine the samples' seeds."""

    prompt: Prompt
    group_id: int
    num_samples: int
    sampling: Sampling
    stream: str = TRAIN_STREAM


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Sampler of scored groups, with the components that all groups share."""

    pool: EnginePool
    rewards: RewardPool
    generate: GenerateFn
    generate_name: str  # rollout.generate, for messages
    tokenizer: Tokenizer  # tokenizer of model.hf_checkpoint
    decode: Callable[[TokenIds], str]  # token ids -> text, special tokens dropped
    chat_template_kwargs: Mapping[str, object]
    max_context_len: int
    seed: int
    usage: RequestCounts  # requests of training groups
    trains: bool  # True if groups of the training stream are trained on

    async def group(
        self,
        request: GroupRequest,
        journal: CallJournal | None = None,
        gate: PauseGate | None = None,
        on_generated: Callable[[], None] | None = None,
    ) -> SampleGroup:
        """Sample and score a group, and return it.

        ``journal`` contains the group's earlier partial completions. Requests wait while ``gate`` is closed. ``on_generated``
        is called once only the rewards are missing.
        """
        n, first = request.num_samples, request.group_id * request.num_samples
        seeds = sample_seeds(self.seed, request.stream, first, n)
        context = GenerateContext(
            sampling=request.sampling,
            decode=self.decode,
            group_id=request.group_id,
            first_sample_id=first,
            max_context_len=self.max_context_len,
            tokenizer=self.tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        is_training = request.stream == TRAIN_STREAM
        usage = self.usage if is_training else RequestCounts(1)  # evaluation requests are not reported
        with self.pool.router.assign(request.sampling.max_new_tokens * n) as assignment:
            required_sampling = request.sampling if is_training and self.trains else None
            engine = ResumableEngine(
                self.pool, assignment, journal or CallJournal(), gate or PauseGate(), usage, required_sampling
            )
            subject = f"prompt {request.prompt.prompt_id} ({request.prompt.dataset})"
            with name_user_errors("rollout.generate", self.generate_name, subject):
                results = await self.generate(request.prompt, engine, seeds, context)
            samples = self._check_samples(results, subject, request.group_id)
        if on_generated is not None:
            on_generated()
        group = SampleGroup(request.group_id, request.prompt, samples)
        return (await self.rewards.score([group], unshaped=not is_training))[0]

    async def groups(self, requests: Sequence[GroupRequest]) -> list[SampleGroup]:
        """Return the groups of all requests, in order; the first failure cancels the others."""
        return await gather_or_cancel([self.group(request) for request in requests])

    def metrics(self) -> list[Metric]:
        """Return metrics of the generate function and of engine usage since the last call."""
        metrics = self.generate.metrics() if isinstance(self.generate, Generator) else ()
        return [*metrics, *self.usage.drain()]

    def warnings(self) -> tuple[str, ...]:
        """Return warnings of the generate function since the last call."""
        return self.generate.warnings() if isinstance(self.generate, Generator) else ()

    async def close(self) -> None:
        """Release the resources of the generate function."""
        if isinstance(self.generate, Generator):
            await self.generate.close()

    def _check_samples(self, returned: object, subject: str, group_id: int) -> tuple[Sample, ...]:
        """Return the samples of a generate function. Raises ``UserCodeError`` if it returned anything else."""
        if isinstance(returned, Sequence):
            items = cast("Sequence[object]", returned)
            wrong_items = [item for item in items if not isinstance(item, Sample)]
            if items and not wrong_items:
                samples = tuple(cast("Sequence[Sample]", items))
                if problem := next(filter(None, (_problem(sample, group_id) for sample in samples)), ""):
                    raise UserCodeError(f"rollout.generate={self.generate_name} for {subject}: {problem}")
                return samples
            description = (
                f"a list with {wrong_items[0]!r:.80} ({type(wrong_items[0]).__name__})" if wrong_items else "no sample"
            )
        else:
            description = f"{returned!r:.80} ({type(returned).__name__})"
        raise UserCodeError(
            f"rollout.generate={self.generate_name} returned {description} for {subject}: it must return the samples of the group, "
            "at least one slime_like.types.Sample"
        )


def _problem(sample: Sample, group_id: int) -> str:
    """Return a description of an invalid field of a user's sample that training would not detect; empty if there is none."""
    name = f"sample {sample.sample_id}"
    if sample.group_id != group_id:
        return f"{name} has group_id {sample.group_id}: give it context.group_id, here {group_id}"
    if sample.status not in UNTRAINED and any(version < 0 for version in sample.versions):
        return f"{name} has sampled tokens of weight version -1: give their span the version of their completion"
    return ""
