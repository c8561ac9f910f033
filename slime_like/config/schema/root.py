"""The whole tree and its order. Cross-field rules live in ``config.rules``."""

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
    """One run."""

    model: ModelConfig = key(ModelConfig, "What is trained.")
    parallel: ParallelConfig = key(ParallelConfig, "How it is split.")
    algo: AlgoConfig = MISSING
    optim: OptimConfig = key(OptimConfig, "AdamW and its schedule.")
    critic: CriticConfig = key(CriticConfig, "The value model of algo=ppo.")
    teacher: TeacherConfig = key(TeacherConfig, "The policy that algo=distill learns from.")
    rollout: RolloutConfig = key(RolloutConfig, "Sampling and engines.")
    reward: RewardConfig = key(RewardConfig, "Who scores.")
    data: DataConfig = key(DataConfig, "Training prompts.")
    evaluation: EvalConfig = key(EvalConfig, "Held-out prompts.")
    loop: LoopConfig = key(LoopConfig, "The circle.")
    weights: WeightsConfig = key(WeightsConfig, "How weights reach the engines.")
    health: HealthConfig = key(HealthConfig, "What becomes of an engine that dies or stalls.")
    placement: PlacementConfig = key(PlacementConfig, "Which machine part runs what.")
    guard: GuardConfig = key(GuardConfig, "The wrapper round collectives.")
    metrics: MetricsConfig = key(MetricsConfig, "Where metrics go.")
    chaos: ChaosConfig = key(ChaosConfig, "Faults planted on purpose.")
    run: RunConfig = key(RunConfig, "Folder, seeds, checkpoints, modes.")
