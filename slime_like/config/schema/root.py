"""Root of the config tree, with groups in the order of ``--help``. Cross-field rules live in ``config.rules``."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import MISSING, Config, key
from slime_like.config.schema.faults import ChaosConfig, HealthConfig
from slime_like.config.schema.guard import GuardConfig
from slime_like.config.schema.model import ModelConfig, OptimConfig, ParallelConfig
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.roles import CriticConfig, TeacherConfig
from slime_like.config.schema.rollout import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig, MetricsConfig, PlacementConfig, RunConfig, WeightsConfig


@dataclass(kw_only=True)
class TrainConfig(Config):
    """Configuration of one run."""

    model: ModelConfig = key(ModelConfig, "Checkpoint, dtype, kernels and activation recompute.")
    parallel: ParallelConfig = key(ParallelConfig, "Parallelism sizes of the trainer.")
    algo: AlgoConfig = MISSING
    optim: OptimConfig = key(OptimConfig, "AdamW and learning-rate schedule.")
    critic: CriticConfig = key(CriticConfig, "Value model of algo=ppo.")
    teacher: TeacherConfig = key(TeacherConfig, "Teacher policy of algo=distill.")
    rollout: RolloutConfig = key(RolloutConfig, "Sampling and SGLang engines.")
    reward: RewardConfig = key(RewardConfig, "Reward functions and their process pool.")
    data: DataConfig = key(DataConfig, "Training prompts.")
    evaluation: EvalConfig = key(EvalConfig, "Held-out prompts and their sampling.")
    loop: LoopConfig = key(LoopConfig, "Training loop: number of rollouts, batch sizes, staleness.")
    weights: WeightsConfig = key(WeightsConfig, "Weight transfer to the engines and its probe.")
    health: HealthConfig = key(HealthConfig, "Health checks and restarts of engines.")
    placement: PlacementConfig = key(PlacementConfig, "Assignment of processes to devices and nodes.")
    guard: GuardConfig = key(GuardConfig, "Wrapper around collectives: memory guard, deadline, record of ops.")
    metrics: MetricsConfig = key(MetricsConfig, "Metric sinks.")
    chaos: ChaosConfig = key(ChaosConfig, "Fault injection.")
    run: RunConfig = key(RunConfig, "Folder, seeds, checkpoints and modes.")
