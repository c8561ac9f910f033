"""Extension points and component interfaces, as Protocols: rollout, trainer, weights.

torch is imported only for type checking. ``algo_interfaces`` defines the interfaces of algorithms, ``metrics.types`` that of
a metric sink.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from slime_like.batch import PackedBatch, TrainBatch
from slime_like.metrics.types import Metric
from slime_like.store.store import StoreRow
from slime_like.types import F32, I32, Prompt, Reward, RoutedExperts, Sample, SampleGroup, StepStats

if TYPE_CHECKING:
    from torch import Tensor


# ---- rollout ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request. With ``temperature`` 0 the engine takes the most likely token."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a request: R sampled tokens."""

    token_ids: I32  # [R]
    logprobs: F32  # [R], log-softmax(logits / temperature) of the sampled token
    versions: tuple[tuple[int, int, int], ...]  # (start, stop, weight version) over [0, R)
    finish: str  # stop | length | abort
    prompt_tokens: int = 0  # number of prompt tokens of the request
    cached_tokens: int = 0  # number of those that were in the prefix cache
    # [prompt + R - 1, blocks, experts per token], see ``data.routing``; None unless algo.routing_replay=rollout
    routed_experts: RoutedExperts | None = None
    row: StoreRow | None = None  # row of the group's store that holds prompt and completion; the arrays are views of it


class Engine(Protocol):
    """Inference engine that a generate function calls: token ids in, token ids out."""

    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> Sequence[Completion]:
        """Return one completion of the prompt ``token_ids`` per seed."""
        ...

    async def score(self, token_ids: Sequence[I32], temperature: float) -> list[F32]:
        """Return the log-probabilities [L - 1] of each sequence, at ``temperature``.

        They are those of tokens 1 to L - 1, each given the tokens before it.
        """
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this project uses."""

    @property
    def name_or_path(self) -> str: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> object: ...
    def __call__(self, text: list[str], /, **options: bool) -> Mapping[str, Sequence[object]]:
        """Return the encoded texts as columns, such as ``input_ids``."""
        ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], /, **options: object) -> object:
        """Render chat messages; with ``tokenize=False``, return them as text."""
        ...


TokenIds = Sequence[int] | I32


@dataclass(frozen=True, slots=True)
class GenerateContext:
    """Settings, ids and tokenizer for one group, which a generate function gets in addition to prompt, engine and seeds."""

    sampling: Sampling
    decode: Callable[[TokenIds], str]  # decodes token ids; drops special tokens
    group_id: int
    first_sample_id: int
    max_context_len: int
    tokenizer: Tokenizer  # tokenizer of model.hf_checkpoint; pass it to ``data.chat.tokenize`` to encode a tool's text
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])  # data.chat_template_kwargs


class GenerateFn(Protocol):
    """Function that generates the samples of one group, in the rollout manager's event loop."""

    async def __call__(
        self, prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
    ) -> Sequence[Sample]: ...


@runtime_checkable
class Generator(GenerateFn, Protocol):
    """A stateful ``GenerateFn``: the class that ``rollout.generate`` names, instantiated with the ``RolloutConfig``."""

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics since the last call. Each name needs an entry in ``metrics.dictionary``.

        The driver reduces the metrics of all rollout managers. If several managers report a ``Last`` metric of the same name,
        the driver keeps the value of the last manager.
        """
        ...

    def warnings(self) -> tuple[str, ...]:
        """Return the warnings for the user since the last call."""
        ...

    async def close(self) -> None:
        """Release resources at the end of the run."""
        ...


class RewardFn(Protocol):
    """Function that scores one sample, in a process pool and under a deadline. Worker processes import it by its path."""

    def __call__(self, prompt: Prompt, sample: Sample) -> Reward | float: ...


class GroupRewardFn(Protocol):
    """Function that scores the samples of a prompt together, and returns one reward per sample in the same order.

    It is marked by ``reward.kinds.scores_groups``. It does not get samples that failed, were aborted or have a reward already.
    """

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Reward | float]: ...


class GroupFilter(Protocol):
    """Function that returns ``None`` to keep the group, or the reason for dropping it: a short text, which names a metric."""

    def __call__(self, group: SampleGroup) -> str | None: ...


class DataSource(Protocol):
    """A resumable stream of prompts."""

    def __len__(self) -> int: ...
    def next(self, num_prompts: int, /) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts; a new epoch begins when one ends."""
        ...

    def metrics(self) -> tuple[Metric, ...]:
        """Return metrics of the data, such as ``data/bad_rows``."""
        ...

    def state(self) -> Mapping[str, object]:
        """Return the cursor, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue from a cursor that the method ``state`` returned."""
        ...


# ---- trainer ---------------------------------------------------------------------------------------------------------
class Trainer(Protocol):
    """Driver-side interface to all trainer ranks."""

    @property
    def version(self) -> int:
        """Version of the weights on the ranks. Each ``step`` adds 1, even if the rollout is empty or the actor is frozen."""
        ...

    def step(self, batch: TrainBatch) -> StepStats:
        """Send each rank its shard, compute log-probabilities and advantages, and take every optimizer step of the batch.

        A frozen actor (``critic.warmup_rollouts``) takes no step.
        """
        ...

    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32:
        """Return [T] log-probabilities at the sampling temperature, 0 at each sequence's first token.

        ``float64_kind`` names the kind of layer to compute in float64 (a name in the table FLOAT64_LAYERS, or all).
        """
        ...

    def kernels(self) -> tuple[str, ...]:
        """Return descriptions of the kernels that the layers with several implementations (``MultiKernelLayer``) have used."""
        ...

    def token_advantages(self, sample_ids: Collection[int]) -> Mapping[int, F32]:
        """Return a dict from sample id to the advantages [L] that the ranks computed for the last rollout that was not empty.

        It contains those of ``sample_ids`` that were in that rollout. It is empty if the algorithm uses group advantages, or if
        the run dumps no rollouts.
        """
        ...

    def release_communicators(self) -> None:
        """Release the communicators until a later method needs them, if ``guard.release`` is set."""
        ...

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Take a snapshot of the state and begin to write it to ``folder/iter_<iteration>``. ``step`` may run meanwhile.

        No earlier save may be pending. Raises ``CheckpointError`` if the save cannot begin.
        """
        ...

    def finish_save(self, *, wait: bool) -> bool:
        """Complete any pending save and return True. Without ``wait``, return False if a rank is still writing.

        Raises ``CheckpointError`` if a rank failed to write its part or did not write it in time, or if the folder cannot be
        completed.
        """
        ...

    def load(self, folder: Path, iteration: int) -> None: ...
    def export_hf(self, folder: Path) -> None: ...


@runtime_checkable
class MultiKernelLayer(Protocol):
    """A layer with more than one kernel implementation."""

    def kernels(self) -> str:
        """Return a sentence for the log about the kernels that ran and their versions."""
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
    """HF tensors that a push sends together."""

    tensors: tuple[tuple[str, Tensor], ...]


class WeightSource(Protocol):
    """Weights of one rank, to be pushed. ``buckets`` gathers tensors: all ranks of a pipeline stage must iterate together."""

    @property
    def is_sender(self) -> bool:
        """Return whether this rank holds the gathered tensors of its pipeline stage."""
        ...

    def manifest(self) -> tuple[TensorMeta, ...]:
        """Return the metadata of the tensors that this rank's pipeline stage will send, in order."""
        ...

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors of the manifest, in order, in buckets of up to ``max_bytes``; a larger tensor gets its own bucket.

        This is a collective over the ranks of the pipeline stage. Ranks that are not senders get the same number of buckets,
        all of them empty. A tensor may share memory with the parameter: use it before the next optimizer step.
        """
        ...


@runtime_checkable
class ReplicatedWeightSource(WeightSource, Protocol):
    """Weights that every rank of the trainer can gather."""

    def replicated_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield the tensors of all pipeline stages, in the same buckets on every trainer rank.

        This is a collective over all trainer ranks: they must iterate together.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address and key by which a trainer rank reaches an engine."""

    name: str
    url: str
    admin_key: str
    tp: int
    num_nodes: int = 1
    gpus: tuple[int, ...] = ()  # run-local index of each rank's GPU; () on a CPU, or if no trainer rank uses these GPUs


class WeightReceiver(Protocol):
    """Engine that a ``WeightSender`` sends to, between ``EngineClient.begin_update`` and ``EngineClient.end_update``."""

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks of the engine."""
        ...

    @property
    def host(self) -> str:
        """Address of the engine's node; empty for an engine on several nodes, which share no memory."""
        ...

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU of each rank of the engine; see ``EngineAddress.gpus``."""
        ...

    async def update_from_tensors(self, *payloads: bytes) -> None:
        """Load tensors: a single payload on every rank of the engine, or one payload per rank, in the order of the ranks.

        A payload is a pickled ``[(name, host tensor)]``, or a message of ``weight_sync.shared`` or ``weight_sync.device_memory``.
        """
        ...

    async def init_broadcast_group(
        self, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group whose rank 0 is the sender. The engine's ranks start at ``rank_offset``."""
        ...

    async def update_from_broadcast(self, metas: Sequence[TensorMeta], group_name: str) -> None:
        """Receive and load the tensors described by ``metas``, which rank 0 of the group broadcasts in this order."""
        ...

    async def destroy_broadcast_group(self, group_name: str) -> None: ...

    async def close(self) -> None:
        """Close the connections; the engine keeps running."""
        ...


class WeightSender(Protocol):
    """Transport of one rank's weights to the engines."""

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        """Send all buckets. The sender of a pipeline stage returns the metadata of the stage's tensors, other ranks return [].

        This is a collective over the ranks of the stage (with IPC, over all trainer ranks). If sending fails, for example
        because an engine is lost, the rank completes the collective before it raises the error.
        """
        ...

    async def close(self) -> None:
        """Close the connections and release memory and process groups shared with the engines. The engines may have exited."""
        ...
