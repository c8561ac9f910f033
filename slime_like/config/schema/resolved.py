"""What the plan decides, in the form the parts of a run receive: no ``auto`` is left. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_like.config.schema.guard_policy import NO_GUARD, GuardSpec
from slime_like.config.schema.model import ModelConfig, OptimConfig
from slime_like.config.schema.policy import AlgoConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of the trainer; rank order is megatron's tp-cp-ep-dp-pp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None  # parameters, of overlap_grad_reduce
    vpp: int = 1  # virtual pipeline stages per pipeline rank
    segments: tuple[int, ...] = ()  # decoder blocks per pipeline segment, pp * vpp of them; (): an even split

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Everything a trainer rank needs to know."""

    model: ModelConfig
    optim: OptimConfig
    algo: AlgoConfig
    layout: Layout
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16
    temperature: float
    num_steps: int  # optimizer steps of the whole run, for schedules
    steps_per_rollout: int
    max_tokens_per_rank: int
    seed: int
    deadline_s: float
    deterministic: bool = False  # the engine's bits, and the same ones each time
    model_key: str = "model.hf_checkpoint"  # which names the checkpoint
    teacher_checkpoint: str | None = None  # a teacher of the policy's shape, scored by swapping weights
    guard: GuardSpec = NO_GUARD
    sample_tolerance: float | None = None  # largest |trainer - engine| log-probability of a trained token; None: any
    drift_by_layer: bool = False  # report that difference with each kind of layer in float64
    verify: bool = True  # compare checkpoints with their hashes before they are loaded
    tells_advantages: bool = False  # of each token, when an update is over: copies of them are kept on the host

    @property
    def swaps_teacher(self) -> bool:
        """Whether these ranks score by the teacher's weights as well."""
        return self.teacher_checkpoint is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the reward reads log-probabilities of the reference policy."""
        return any(getattr(self.algo, name, 0.0) > 0 for name in ("kl_loss_coef", "kl_coef"))

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a forward pass before the update is needed: with one step per rollout the update's own forward serves."""
        if getattr(self.algo, "kl_coef", 0.0) > 0:  # KL to the reference in the reward
            return True
        return self.steps_per_rollout > 1 and not getattr(self.algo, "use_rollout_logprobs", False)


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """Everything a critic rank needs to know."""

    rank: ActorSpec  # its checkpoint, optimizer and layout in the actor's terms
    value_clip: float | None
    load: str | None  # folder of an iteration of an earlier critic; None: a fresh value head
    warmup_rollouts: int


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """Everything a teacher rank needs to know."""

    rank: ActorSpec  # its checkpoint and layout in the actor's terms


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything one SGLang engine needs to know."""

    model_path: str
    device: str  # cpu | cuda
    dtype: str
    tp: int
    context_length: int
    seed: int
    log_path: str
    start_deadline_s: float
    request_deadline_s: float
    max_running_requests: int | None = None
    deterministic: bool = False  # bits that do not depend on the batch
    cpu_kernels: str = "auto"  # auto | c | torch | off
    trained_on: bool = False  # its samples are: it has no variable that changes what SGLang samples
    sglang: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """How weights travel from the trainer's ranks to the engines."""

    kind: str  # a name of table TRANSPORTS
    backend: str  # gloo | nccl, of a broadcast group
    max_bytes: int  # largest bucket
    deadline_s: float
