"""algo.*: one schema per algorithm, chosen by ``algo=<name>``.

Besides the keys of ``AlgoConfig``, which every schema has, a schema has only keys that affect its algorithm. The schemas of
ppo and distill are in ``schema.role_algo``.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import key, within
from slime_like.config.schema.policy import (
    AGGREGATIONS,
    KL_TYPES,
    AlgoConfig,
    PolicyConfig,
    PolicyGradientConfig,
    refuse_idle_kl,
)
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class GrpoConfig(PolicyGradientConfig):
    """GRPO: (reward - mean of the group) / standard deviation of the group."""

    name: str = key("grpo", "Algorithm.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")


@dataclass(kw_only=True)
class DrGrpoConfig(PolicyGradientConfig):
    """Dr. GRPO: no division by the standard deviation or the response length."""

    name: str = key("dr_grpo", "Algorithm.")
    group_advantage: str | None = key("dr_grpo", "Advantage from the rewards of a group.")
    aggregation: str = key("dr_grpo", "Aggregation of token losses.", choices=AGGREGATIONS)


@dataclass(kw_only=True)
class RlooConfig(PolicyGradientConfig):
    """RLOO: reward minus the mean reward of the other samples of the group."""

    name: str = key("rloo", "Algorithm.")
    group_advantage: str | None = key("rloo", "Advantage from the rewards of a group.")


@dataclass(kw_only=True)
class DapoConfig(PolicyGradientConfig):
    """DAPO: GRPO with a wider upper clip range and a token-level loss.

    The keys of DAPO's dynamic sampling and overlong penalty are in rollout.* and reward.*, for all algorithms except sft.
    """

    name: str = key("dapo", "Algorithm.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")
    eps_clip_high: float | None = key(0.28, "Upper clip range; null: eps_clip.")


@dataclass(kw_only=True)
class GspoConfig(PolicyGradientConfig):
    """GSPO: one clipped ratio per sequence, the geometric mean of its token ratios."""

    name: str = key("gspo", "Algorithm.")
    loss: str = key("gspo", "Token loss.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")
    aggregation: str = key("sequence_mean", "Aggregation of token losses: GSPO's loss is per sequence.")
    eps_clip: float = key(3e-4, "Lower clip range of the sequence ratio.")
    eps_clip_high: float | None = key(4e-4, "Upper clip range of the sequence ratio; null: eps_clip.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if self.aggregation != "sequence_mean":
            raise ConfigError(
                f"{prefix}aggregation={self.aggregation!r} with algo=gspo: ratio and loss are per sequence, "
                f"so each sequence counts once; set {prefix}aggregation=sequence_mean"
            )


@dataclass(kw_only=True)
class CispoConfig(PolicyConfig):
    """CISPO: the clipped ratio is a weight without gradient, so clipping never removes a token's gradient."""

    name: str = key("cispo", "Algorithm.")
    loss: str = key("cispo", "Token loss.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")
    eps_clip: float = key(1.0, "Lower clip range of the weight; at 1 or more there is no lower bound.")
    eps_clip_high: float | None = key(4.0, "Upper clip range: a weight is at most 1 + eps_clip_high; null: eps_clip.")


@dataclass(kw_only=True)
class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """REINFORCE++: KL in the reward, returns per token, whitened over the batch."""

    name: str = key("reinforce_pp", "Algorithm.")
    token_advantage: str | None = key("reinforce_pp", "Advantage per token, computed on the trainer ranks.")
    gamma: float = key(1.0, "Discount factor.")
    kl_coef: float = key(0.0, "Weight of the per-token KL to the reference that is subtracted from the reward.")
    kl_reward_type: str = key("k1", "KL estimator in the reward.", choices=KL_TYPES, table="KL_ESTIMATORS")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 0.0, 1.0, "gamma")
        refuse_idle_kl(prefix, self, "kl_coef", "kl_reward_type")


@dataclass(kw_only=True)
class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
    """REINFORCE++-baseline: reward minus the group's mean, minus the KL per token, whitened over the batch."""

    name: str = key("reinforce_pp_baseline", "Algorithm.")
    group_advantage: str | None = key("dr_grpo", "Advantage from the rewards of a group, before whitening.")
    token_advantage: str | None = key("reinforce_pp_baseline", "Advantage per token, computed on the trainer ranks.")
    kl_coef: float = key(0.0, "Weight of the per-token KL to the reference that is subtracted from the advantage.")
    kl_reward_type: str = key("k1", "KL estimator in the advantage.", choices=KL_TYPES, table="KL_ESTIMATORS")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        refuse_idle_kl(prefix, self, "kl_coef", "kl_reward_type")


@dataclass(kw_only=True)
class SftConfig(AlgoConfig):
    """Supervised fine-tuning on the label or the assistant turns of each row; no engine runs."""

    name: str = key("sft", "Algorithm.")
    loss: str = key("sft", "Token loss.")
