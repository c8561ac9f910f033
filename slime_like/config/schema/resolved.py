"""Specs that the plan resolves from the config, one per component.

A value that the component's process chooses, such as the kernels of a CPU, may be auto. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.guard_policy import NO_GUARD, GuardSpec
from slime_like.config.schema.model import ModelConfig, OptimConfig
from slime_like.config.schema.policy import AlgoConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of the trainer; rank order is Megatron's tp-cp-ep-dp-pp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None  # parameters per bucket of overlap_grad_reduce
    vpp: int = 1  # virtual pipeline stages per pipeline rank
    segments: tuple[int, ...] = ()  # decoder layers of each of the pp * vpp pipeline segments; (): an even split

    @property
    def world_size(self) -> int:
        """Return the number of trainer ranks."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Settings of an actor rank, or of a critic or teacher rank as part of ``CriticSpec`` or ``TeacherSpec``."""

    model: ModelConfig
    optim: OptimConfig
    algo: AlgoConfig
    layout: Layout
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16
    temperature: float
    num_steps: int  # optimizer steps of the run, for schedules
    steps_per_rollout: int
    max_tokens_per_rank: int
    seed: int
    deadline_s: float
    deterministic: bool = False  # bitwise reproducible; on a CPU also bitwise equal to the engine
    model_key: str = "model.hf_checkpoint"  # config key of the checkpoint, for messages
    teacher_checkpoint: str | None = None  # teacher with the policy's shape, whose weights are swapped in to score
    guard: GuardSpec = NO_GUARD
    sample_tolerance: float | None = (
        None  # maximum |trainer - engine| log-probability difference of a trained token; None: no limit
    )
    drift_by_layer: bool = False  # also report that difference with each kind of layer run in float64
    verify: bool = True  # check hashes of checkpoints before loading
    returns_advantages: bool = False  # keep the advantages of the last rollout on the host, for ``token_advantages``

    @property
    def swaps_teacher(self) -> bool:
        """Return whether these ranks also score with the teacher's weights."""
        return self.teacher_checkpoint is not None

    @property
    def routing_replay(self) -> str:
        """Return the source of the experts that training passes replay; ``off`` if they replay none."""
        mode: str = getattr(self.algo, "routing_replay", "off")
        return "off" if mode == "old" and not self.needs_old_logprobs else mode

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss, the reward or the advantage reads log-probabilities of the reference policy."""
        return any(getattr(self.algo, name, 0.0) > 0 for name in ("kl_loss_coef", "kl_coef"))

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether old log-probabilities need their own forward pass.

        They do if a KL to the reference is in the reward or the advantage. Otherwise, they do only if a rollout has several
        steps and ``algo.use_rollout_logprobs`` is off: with one step, the update's forward pass computes them, and with that
        key, the engine's log-probabilities take their place. In algo=sft, only a loss or an advantage of the user reads them.
        """
        if isinstance(self.algo, SftConfig) and self.algo.loss == "sft" and self.algo.token_advantage is None:
            return False
        if getattr(self.algo, "kl_coef", 0.0) > 0:  # KL to the reference in the reward or the advantage
            return True
        return self.steps_per_rollout > 1 and not getattr(self.algo, "use_rollout_logprobs", False)


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """Settings of a critic rank."""

    rank: RankSpec  # the critic's checkpoint, optimizer and layout, as for an actor
    value_clip: float | None
    load: str | None  # folder of an earlier critic's iteration; None: a new value head
    warmup_rollouts: int


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """Settings of a teacher rank."""

    rank: RankSpec  # the teacher's checkpoint and layout, as for an actor


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Settings of one SGLang engine."""

    model_path: str
    device: str  # cpu | cuda
    dtype: str
    tp: int
    context_length: int
    seed: int
    log_path: str
    start_deadline_s: float
    max_running_requests: int | None = None  # None: SGLang chooses
    admits_by_kv: bool = False  # admit requests as long as their expected tokens fit the KV cache
    deterministic: bool = False  # outputs are bitwise independent of the batch
    cpu_kernels: str = "auto"  # auto | c | torch | off
    num_nodes: int = 1  # each node runs tp / num_nodes ranks
    dp_attention: int = 1  # groups of ranks that hold different sequences
    dcp: int = 1  # ranks that share the KV cache of a sequence
    dcp_comm: str = "ag_rs"  # exchange of partial attention within a DCP group: ag_rs | a2a
    dcp_replicate_q: bool = False  # each rank of a DCP group computes the queries of the whole group
    flow_mla: str = ""  # settings of FlowMLA (FlowOptions.to_json); empty: every rank holds all attention weights
    remote_experts: str = ""  # settings of remote experts (RemoteOptions.to_json); empty: the engine has all experts
    releases_memory: bool = (
        False  # its device memory is released while the trainer needs it (placement.offload_rollout)
    )
    float8: bool = False  # serve the weights of a float8 checkpoint as stored
    symmetric_memory: bool = False  # collectives use NCCL symmetric memory
    latent: bool = False  # the model has latent attention
    returns_experts: bool = False  # responses include the routed experts of each token
    feeds_training: bool = False  # samples are trained on, so no environment variable may change SGLang's sampling
    health_timeout_s: float = 30.0  # limit of a health check that decodes a token
    sglang: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """Return the phases, prefill or decode, that have no CUDA graphs by default.

        A graph backend for the phase in the field ``sglang`` overrides this.
        """
        if self.remote_experts:
            return "prefill", "decode"  # a request to a worker cannot be captured
        # SGLang cannot release its prefill graphs, and FlowMLA's gathers were not tested within them.
        return ("prefill",) if self.flow_mla or self.releases_memory else ()


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """Settings of the weight transport from trainer ranks to engines."""

    kind: str  # a name registered in COLOCATED_TRANSPORTS or SPLIT_TRANSPORTS
    backend: str  # backend of a broadcast group: gloo | nccl
    max_bytes: int  # maximum bucket size
    deadline_s: float
    peer_timeout_s: float = 30.0  # an engine counts as lost if its machine acknowledges nothing for this long
