"""The seams of the circle, as Protocols. torch appears only in annotations: importing this file costs nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slime_like.batch import PackedBatch, TrainBatch
from slime_like.metrics.types import Metric, RunWarning
from slime_like.types import F32, I32, Prompt, Reward, Sample, SampleGroup, StepStats

if TYPE_CHECKING:
    from torch import Tensor


# ---- rollout ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples. ``temperature`` 0 is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answers to one request: R sampled tokens."""

    token_ids: I32  # [R]
    logprobs: F32  # [R], log-softmax(logits / temperature) of the sampled token
    versions: tuple[tuple[int, int, int], ...]  # (start, stop, weight version) over [0, R)
    finish: str  # stop | length | abort
    prompt_tokens: int = 0  # tokens the engine was given
    cached_tokens: int = 0  # of these, those whose KV it had from an earlier request


class Engine(Protocol):
    """What rollout code knows of an inference engine. Token ids in, token ids out."""

    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> Sequence[Completion]:
        """``len(seeds)`` completions of one prompt, sent as one group."""
        ...

    async def score(self, token_ids: Sequence[I32], temperature: float) -> list[F32]:
        """Per sequence [L - 1] log-probabilities of tokens 1..L-1 given those before."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateContext:
    """What a generate function gets besides prompt and engine."""

    sampling: Sampling
    decode: Any  # Callable[[Sequence[int]], str]: token ids -> text, special tokens dropped
    group_id: int
    first_sample_id: int
    max_context_len: int
    tokenizer: Any = None  # of model.hf_checkpoint: ``data.chat.tokenize`` turns what the model did not write into ids
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # data.chat_template_kwargs


class GenerateFn(Protocol):
    """Prompt -> samples of one group: one turn, many turns, tools. Runs in the rollout manager's event loop."""

    async def __call__(
        self, prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
    ) -> Sequence[Sample]: ...


@runtime_checkable
class Generator(GenerateFn, Protocol):
    """A ``GenerateFn`` with a life of its own: a class given as ``rollout.generate`` is made with the ``RolloutConfig``."""

    def metrics(self) -> tuple[Metric, ...]:
        """What happened since the last call; names need an entry in ``metrics.dictionary`` to be documented."""
        ...

    def warnings(self) -> tuple[str, ...]:
        """What a user should be told since the last call."""
        ...

    async def close(self) -> None:
        """The run ends."""
        ...


class RewardFn(Protocol):
    """Scores one sample. Runs in a process pool under a deadline; must be importable by its dotted path."""

    def __call__(self, prompt: Prompt, sample: Sample) -> Reward | float: ...


class GroupRewardFn(Protocol):
    """Scores all samples of a prompt together, in their order; marked by ``reward.kinds.scores_groups``."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Reward | float]: ...


class GroupFilter(Protocol):
    """``None`` keeps the group; otherwise the reason it is dropped, which is counted as a metric."""

    def __call__(self, group: SampleGroup) -> str | None: ...


class DataSource(Protocol):
    """A resumable stream of prompts."""

    def __len__(self) -> int: ...
    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, starting a new epoch where one ends."""
        ...

    def metrics(self) -> tuple[Metric, ...]:
        """What is worth knowing of the data, such as ``data/bad_rows``."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


# ---- algorithms ------------------------------------------------------------------------------------------------------
class GroupAdvantage(Protocol):
    """rewards_G -> advantages_G of one group, in the driver."""

    def __call__(self, rewards_G: F32) -> F32: ...


class Reduce(Protocol):
    """The only collective an algorithm may use: element-wise sum over all ranks that hold part of the batch."""

    def sum(self, value: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenView:
    """One packed micro-batch on a rank, as an algorithm sees it. Columns stand at the predicted token, as in ``PackedBatch``.

    Whole sequences even under context parallelism: score columns are gathered before an algorithm reads them.
    """

    cu_seqlens: Tensor  # I32 [S + 1]
    loss_weight: Tensor  # F32 [T], 0 where not trained
    rewards: Tensor  # F32 [S]
    advantages: Tensor | None  # F32 [S], group advantages
    rollout_logprobs: Tensor  # F32 [T], behaviour policy
    old_logprobs: Tensor | None  # F32 [T], proximal policy
    ref_logprobs: Tensor | None  # F32 [T]
    teacher_logprobs: Tensor | None = None  # F32 [T], of a policy to be learnt from
    values: Tensor | None = None  # F32 [T], a critic's estimate of the return from the token on, before the token


class TokenAdvantage(Protocol):
    """Advantages per token for all micro-batches of a rollout on this rank, before the first optimizer step."""

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """F32 [T] per view."""
        ...


@runtime_checkable
class HasCriticTargets(Protocol):
    """A ``TokenAdvantage`` that has a critic: what the critic is to learn."""

    def returns(self, views: Sequence[TokenView]) -> list[Tensor]:
        """F32 [T] per view, 0 where not trained."""
        ...


@runtime_checkable
class Diagnostics(Protocol):
    """A ``TokenAdvantage`` with numbers of its own to report."""

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> Mapping[str, float]:
        """Metric name below ``train/`` -> value over all ranks."""
        ...


class Sequences(Protocol):
    """The sequences of a micro-batch, though a rank holds only a part of each under context parallelism.

    N of this rank's tokens, S sequences. Sums are differentiable collectives over the ranks that share the sequences:
    every such rank calls the same ones in the same order, also one that holds no token of them.
    """

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [S]: over each whole sequence's trained tokens."""
        ...

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [S]: over each whole sequence's trained tokens."""
        ...

    def spread(self, values: Tensor) -> Tensor:
        """[S] -> [N]: each token gets its sequence's value."""
        ...


@dataclass(frozen=True, slots=True)
class LossView:
    """What a token loss reads. [T] columns at the predicted token; under context parallelism this rank's part of them."""

    logprobs: Tensor  # F32 [T], carries the gradient
    entropy: Tensor | None  # F32 [T], carries the gradient; present when the loss asks for it
    loss_weight: Tensor  # F32 [T]
    advantages: Tensor | None  # F32 [T]
    old_logprobs: Tensor | None  # F32 [T]; None: the update is its own old policy
    rollout_logprobs: Tensor  # F32 [T]
    ref_logprobs: Tensor | None  # F32 [T]
    sequences: Sequences | None = None  # for what speaks of whole sequences


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss`` is multiplied by loss_weight and summed by the caller; ``means``/``maxima`` become metrics train/<name>."""

    loss: Tensor  # F32 [T]
    means: Mapping[str, Tensor]  # F32 [T], averaged with loss_weight
    maxima: Mapping[str, Tensor]  # F32 [T], largest where loss_weight > 0


class LossFn(Protocol):
    """A token loss bound to its config."""

    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput: ...


# ---- trainer ---------------------------------------------------------------------------------------------------------
class Trainer(Protocol):
    """The driver's view of all trainer ranks."""

    @property
    def version(self) -> int:
        """Of the weights the ranks hold: +1 per rollout trained on."""
        ...

    def step(self, batch: TrainBatch) -> StepStats:
        """Ship each dp shard once, annotate scores, take every optimizer step of the batch."""
        ...

    def score(self, rows: PackedBatch, exact: str | None = None) -> F32:
        """[T] log-probabilities at the sampling temperature, 0 at each sequence's first token.

        ``exact``: a kind of layer (table EXACT_LAYERS, or all) that is computed in float64.
        """
        ...

    def kernels(self) -> tuple[str, ...]:
        """What layers with kernels to choose from say of those that have run."""
        ...

    def token_advantages(self, sample_ids: Collection[int]) -> Mapping[int, F32]:
        """Sample id -> [L] advantages that the ranks computed for the rollout of the last ``step``.

        Of the ``sample_ids`` that it held; none where the algorithm's advantages are the group's, nor in a run that dumps no
        rollouts.
        """
        ...

    def rest(self) -> None:
        """Rollouts run, and no rank communicates until the next call: what only communication needs may go."""
        ...

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Copy everything as it is now and begin to write ``folder/iter_<iteration>``; ``step`` may go on."""
        ...

    def finish_save(self, *, wait: bool) -> bool:
        """Whether what was begun is whole, on all ranks. Raises ``CheckpointError`` when a rank could not write."""
        ...

    def load(self, folder: Path, iteration: int) -> None: ...
    def export_hf(self, folder: Path) -> None: ...


@runtime_checkable
class NamesKernels(Protocol):
    """A layer with kernels to choose from."""

    def kernels(self) -> str:
        """Which of them ran, with versions; a sentence for the log."""
        ...


# ---- weights ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, shape and dtype of one HF tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # float32 | bfloat16 | ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """HF tensors that travel together."""

    tensors: tuple[tuple[str, Tensor], ...]


class WeightSource(Protocol):
    """The trainer side on one rank. All ranks of a pipeline stage iterate together: gathers are collectives."""

    @property
    def is_sender(self) -> bool:
        """Whether this rank holds the gathered tensors of its pipeline stage."""
        ...

    def manifest(self) -> tuple[TensorMeta, ...]:
        """What this rank's pipeline stage will send, in order."""
        ...

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """The tensors of the manifest, in order; a tensor larger than ``max_bytes`` is a bucket of its own."""
        ...


class WeightReceiver(Protocol):
    """The engine side of a push, as a sender sees it. Only valid between ``begin_update`` and ``end_update``."""

    @property
    def tp(self) -> int:
        """Ranks of the engine."""
        ...

    @property
    def host(self) -> str:
        """Address of the engine's node."""
        ...

    async def update_from_tensors(self, payload: bytes) -> None:
        """Load a pickled ``[(name, host tensor)]``, or what a message of ``weights.shared`` describes."""
        ...

    async def init_broadcast_group(
        self, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a group whose rank 0 is the sender; the engine's ranks follow from ``rank_offset``."""
        ...

    async def update_from_broadcast(self, metas: Sequence[TensorMeta], group_name: str) -> None:
        """Receive and load ``metas``, broadcast in this order by rank 0."""
        ...

    async def destroy_broadcast_group(self, group_name: str) -> None: ...

    async def close(self) -> None:
        """Close the connections; the engine runs on."""
        ...


class WeightSender(Protocol):
    """One rank's half of a push."""

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        """Send all buckets; returns what this rank sent. A collective over the ranks of a pipeline stage: where an engine
        is lost, the rank takes part to the end before it raises."""
        ...

    async def close(self) -> None:
        """Give up what it shares with the engines, which may be gone; connections too."""
        ...


class MetricSink(Protocol):
    """Where reduced metrics go."""

    def log(self, step: int, values: Mapping[str, float], spans: Mapping[str, tuple[float, float]]) -> None: ...
    def note(self, text: str) -> None:
        """A line for whoever watches."""
        ...

    def warn(self, step: int, warning: RunWarning) -> None:
        """Keep a warning of ``step`` where the run is looked at later."""
        ...

    def close(self) -> None: ...
